"""Slow twins: the evaluation written as plain loops, from the published text, sharing nothing with the library."""

from fractions import Fraction

import numpy as np


class SlowIndex:
    """The index protocol by brute force: every score is one float64 dot product, every order a Python sort."""

    def __init__(self, xb):
        self.xb = np.asarray(xb, dtype=np.float64)
        self.rows, self.dim = self.xb.shape

    def one_score(self, x, row):
        return float(sum(float(a) * float(b) for a, b in zip(x, self.xb[row])))

    def order(self, x):
        return sorted(range(self.rows), key=lambda row: (-self.one_score(x, row), row))

    def search(self, xq, k):
        lists = [self.order(x)[:k] for x in xq]
        scores = [[self.one_score(x, row) for row in rows] for x, rows in zip(xq, lists)]
        width = min(k, self.rows)
        return (
            np.array(scores, dtype=np.float32).reshape(len(xq), width),
            np.array(lists, dtype=np.int32).reshape(len(xq), width),
        )

    def score(self, xq, rows):
        return np.array([[self.one_score(x, row) if row >= 0 else 0.0 for row in mine] for x, mine in zip(xq, rows)])

    def count_above(self, xq, scores, rows):
        counts = np.zeros(rows.shape, dtype=np.int64)
        for i, x in enumerate(xq):
            every = [self.one_score(x, row) for row in range(self.rows)]
            for j, (score, row) in enumerate(zip(scores[i], rows[i])):
                counts[i, j] = sum(s > score or (s == score and r < row) for r, s in enumerate(every))
        return counts


def exact_average_precision(ranking, positives, junk):
    """Trapezoidal AP of one list as an exact fraction: walk down the list, skip junk, average two precisions a step."""
    position, hits, area = 0, 0, Fraction(0)
    for row in ranking:
        if row in junk:
            continue
        if row in positives:
            before = Fraction(1) if position == 0 else Fraction(hits, position)
            hits += 1
            area += (before + Fraction(hits, position + 1)) / 2
        position += 1
    return area / len(positives)


def published_map(ranks, gnd, kappas):
    """The published evaluation, step by step. ranks (nb, nq) as published: one column for each query."""
    nq, empty = len(gnd), 0
    total, aps, prs = 0.0, np.zeros(nq), np.zeros((nq, len(kappas)))
    for i in range(nq):
        ok, junk = set(gnd[i]["ok"]), set(gnd[i]["junk"])
        if not ok:
            empty += 1
            continue
        positions = [place for place, row in enumerate(ranks[:, i]) if row in ok]
        junk_positions = [place for place, row in enumerate(ranks[:, i]) if row in junk]
        positions = [place - sum(other < place for other in junk_positions) for place in positions]
        ap = 0.0
        for j, rank in enumerate(positions):
            precision_0 = 1.0 if rank == 0 else j / rank
            precision_1 = (j + 1) / (rank + 1)
            ap += (precision_0 + precision_1) / len(ok) / 2
        aps[i] = ap
        total += ap
        one_based = [place + 1 for place in positions]
        for j, kappa in enumerate(kappas):
            kq = min(max(one_based), kappa)
            prs[i, j] = sum(place <= kq for place in one_based) / kq
    counted = nq - empty
    return total / max(counted, 1), aps, prs.sum(axis=0) / max(counted, 1), prs


def published_setups(gnd):
    """The three setups as the published script builds them."""
    return {
        "easy": [{"ok": g["easy"], "junk": [*g["junk"], *g["hard"]]} for g in gnd],
        "medium": [{"ok": [*g["easy"], *g["hard"]], "junk": g["junk"]} for g in gnd],
        "hard": [{"ok": g["hard"], "junk": [*g["junk"], *g["easy"]]} for g in gnd],
    }
