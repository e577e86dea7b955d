"""What a job costs, known before it runs: rows, products, bytes, requests, memory, time and money. Arithmetic alone.

`work.py` has the units and the machines, `graph.py` and `rows.py` the neighbor graph, `augment.py` augmentation,
`stages.py` everything else; `plans.py` puts the stages of each job together and reads `--assume`. The plans that jobs
print and `--plan` are made of these numbers; tests hold them against the counters of real runs.
"""

from lattqe.cost.graph import Cut, cut_rows, graph_here, graph_of_pairs
from lattqe.cost.work import Cost, Machines, Requests, Work

__all__ = ["Cost", "Cut", "Machines", "Requests", "Work", "cut_rows", "graph_here", "graph_of_pairs"]
