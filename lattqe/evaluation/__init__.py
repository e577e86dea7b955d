"""Exact evaluation: revisited and label protocols, from rankings or by counting, with per-query results.

`analysis.py` is not imported here: it reads stored ranks, and what it reads them with imports this package.
"""

from lattqe.evaluation.scores import NOT_RANKED, Scores, average_precision, evaluate, score_ranking
from lattqe.evaluation.truth import LABEL, REVISITED, GradedTruth, GroundTruth, Judgements, LabelTruth, Setup

__all__ = [
    "LABEL",
    "NOT_RANKED",
    "REVISITED",
    "GradedTruth",
    "GroundTruth",
    "Judgements",
    "LabelTruth",
    "Scores",
    "Setup",
    "average_precision",
    "evaluate",
    "score_ranking",
]
