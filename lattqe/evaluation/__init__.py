"""Exact evaluation: revisited and label protocols, from rankings or by counting, with per-query results."""

from lattqe.evaluation.average_precision import NOT_RANKED, average_precision
from lattqe.evaluation.bootstrap import Interval, paired_bootstrap
from lattqe.evaluation.judgements import LABEL, REVISITED, GradedTruth, GroundTruth, Judgements, Setup
from lattqe.evaluation.labels import LabelTruth
from lattqe.evaluation.regimes import Group, group_queries, regimes
from lattqe.evaluation.scores import Scores, evaluate, score_ranking
from lattqe.evaluation.weights import RankProfile, weights_by_rank

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
