"""Exact evaluation: revisited and label protocols, from rankings or by counting, with per-query results."""

from lattqe.evaluation.analysis import (
    Group,
    Interval,
    RankProfile,
    group_queries,
    paired_bootstrap,
    regimes,
    weights_by_rank,
)
from lattqe.evaluation.scores import NOT_RANKED, Scores, average_precision, evaluate, score_ranking
from lattqe.evaluation.truth import LABEL, REVISITED, GradedTruth, GroundTruth, Judgements, LabelTruth, Setup

__all__ = [
    "LABEL",
    "NOT_RANKED",
    "REVISITED",
    "GradedTruth",
    "GroundTruth",
    "Group",
    "Interval",
    "Judgements",
    "LabelTruth",
    "RankProfile",
    "Scores",
    "Setup",
    "average_precision",
    "evaluate",
    "group_queries",
    "paired_bootstrap",
    "regimes",
    "score_ranking",
    "weights_by_rank",
]
