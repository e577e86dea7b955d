"""What a job costs, known before it runs: rows, products, bytes, requests, memory, time and money. Arithmetic alone.

`work.py` has the units and the machines, `assumed.py` reads `--assume`, `graph.py` has the neighbor graph, `stages.py`
everything else. The plans that jobs print and `--plan` are made of these numbers; tests hold them against the counters
of real runs.
"""

from lattqe.cost.assumed import parse_assumption
from lattqe.cost.graph import Cut, cut_rows, graph_here, graph_of_pairs
from lattqe.cost.work import Cost, Machines, Requests, Work

__all__ = [
    "Cost",
    "Cut",
    "Machines",
    "Requests",
    "Work",
    "cut_rows",
    "graph_here",
    "graph_of_pairs",
    "parse_assumption",
]
