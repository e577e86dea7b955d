"""Distractors that look like photographs: descriptors of classes that do not exist, as many as are wanted.

They are drawn from the train splits of the photographs' four sets, whose classes are in no test database, so nothing is
relevant to any query and nothing of test is used but the sizes of its four sets. Class number t is a function of
(seed, t) alone:

class structure  Classes come in families of FAMILY, each from one set; sets get the shares that they have of the real
                 rows. Every class of a family has another donor and its size, spread and shape: the donor's residuals
                 (rows minus class mean), mirrored in the principal axes of the set's residuals by signs drawn for the
                 family. That keeps all products between residuals of a family, so that what classes have in common
                 (poses, lighting) stays, but families of the same donors have nothing in common. Centers are new: the
                 set's mean plus a Gaussian with the covariance of the set's class means, KIN of its variance shared by
                 the family, as birds of a genus are alike: without that, classes would be easier to tell apart than
                 real ones.
norms            A center is scaled to the norm of its donor's mean, which says how tight a class is; rows are then unit
                 vectors in float16, as all stored descriptors are.
similarities     KIN was set by looking at first neighbors: their similarities, and how many are of the same class, for
                 distractors among as many distractors as there are real rows, and for real rows among themselves.
                 `compare` measures both again and `figure` draws them.

    python -m benchmarks.distractors --data PHOTOS --to distractors.svg

draws as many distractors as there are rows in the test databases, compares both, and writes the figure.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lattqe.datasets.labelled import PHOTO_SETS, load_photos

FAMILY, KIN = 32, 0.8  # FAMILY: at most the classes of the smallest train split
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
SAMPLE = 2000  # rows whose first neighbors are compared
DRAWN = "drawn"  # where `compare` keeps what only `figure` needs


@dataclass(frozen=True)
class Donors:
    """One set's train classes: what new ones are drawn from.

    mean: (D,) of the class means; means: (c, D); residuals: (n, D) of each class, in the principal axes;
    axes: (D, D), a column each; share: the part of all rows that is to come from this set.
    """

    mean: np.ndarray
    means: np.ndarray
    residuals: list[np.ndarray]
    axes: np.ndarray
    share: float

    @property
    def class_size(self) -> float:
        """Rows of a class, in the mean."""
        return float(np.mean([len(each) for each in self.residuals]))


def donors(folder: Path, columns: int) -> list[Donors]:
    """The four sets' train classes, with the shares of their test databases."""
    rows = np.array([len(load_photos(name, "test", folder, columns=columns).xb) for name in PHOTO_SETS])
    found = []
    for name, share in zip(PHOTO_SETS, rows / rows.sum()):
        train = load_photos(name, "train", folder, columns=columns)
        classes = [train.xb[train.labels == label].astype(np.float64) for label in np.unique(train.labels)]
        means = np.stack([each.mean(0) for each in classes])
        residuals = [each - mean for each, mean in zip(classes, means)]
        joined = np.concatenate(residuals)
        axes = np.linalg.eigh(joined.T @ joined)[1]
        found.append(Donors(means.mean(0), means, [each @ axes for each in residuals], axes, float(share)))
    return found


def draw_class(sets: list[Donors], seed: int, number: int) -> np.ndarray:
    """Class `number`: (n, D) float32 unit vectors, n as many as its donor has."""
    family = np.random.default_rng([seed, 0, number // FAMILY])
    own = np.random.default_rng([seed, 1, number])
    # A family is of one set. Sets are drawn by class, so that their rows get the shares that are wanted.
    chances = np.array([each.share / each.class_size for each in sets])
    one = sets[family.choice(len(sets), p=chances / chances.sum())]
    spread = (one.means - one.mean) / np.sqrt(len(one.means) - 1)
    common, single = family.standard_normal(len(spread)), own.standard_normal(len(spread))
    center = one.mean + (np.sqrt(KIN) * common + np.sqrt(1 - KIN) * single) @ spread
    donor = family.permutation(len(one.means))[number % FAMILY]
    center *= np.linalg.norm(one.means[donor]) / np.linalg.norm(center)
    mirrored = one.residuals[donor] * family.choice((-1.0, 1.0), len(center))
    rows = center + mirrored @ one.axes.T
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


def draw(sets: list[Donors], count: int, seed: int = 0) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """`count` distractors, class by class: (n, D) float32 rows, and (n,) int32 the number of their class."""
    number = 0
    while count > 0:
        rows = draw_class(sets, seed, number)[:count]
        yield rows, np.full(len(rows), number, np.int32)
        count, number = count - len(rows), number + 1


def first_neighbors(x: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, float]:
    """Of random rows of x (n, D): similarities of their first neighbors in x, and how many are of the same class."""
    rows = np.random.default_rng(3).permutation(len(x))[:SAMPLE]
    similarity = x[rows] @ x.T
    similarity[np.arange(len(rows)), rows] = -1
    return similarity.max(1), float((labels[similarity.argmax(1)] == labels[rows]).mean())


def compare(real: tuple[np.ndarray, np.ndarray], drawn: tuple[np.ndarray, np.ndarray]) -> dict[str, Any]:
    """Statistics of real and of drawn rows, each (rows, labels); of drawn ones as many are taken as are real."""
    found: dict[str, Any] = {}
    for name, (x, labels) in (("real rows", real), ("distractors", tuple(each[: len(real[0])] for each in drawn))):
        similarity, same = first_neighbors(x, labels)
        classes, sizes = np.unique(labels, return_counts=True)
        tightness = [float(np.linalg.norm(x[labels == label].mean(0))) for label in classes]
        found[name] = {
            "rows": len(x),
            "classes": len(tightness),
            "first neighbor's similarity": np.quantile(similarity, QUANTILES).round(3).tolist(),
            "first neighbor of the same class": round(same, 3),
            "norm of class means": np.quantile(tightness, QUANTILES).round(3).tolist(),
            DRAWN: {"similarity": similarity, "norm": tightness, "size": sizes},
        }
    return found


def figure(compared: dict[str, Any], path: Path) -> None:
    """Draw real rows and distractors over each other, as SVG: first neighbors, norms of class means, sizes of classes.

    The norm of a class's mean says how tight the class is: 1 where all of its rows are the same.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels = (
        ("similarity", "similarity of the first neighbor", np.linspace(0.3, 1, 71)),
        ("norm", "norm of a class's mean", np.linspace(0.3, 1, 36)),
        ("size", "rows of a class", np.linspace(0, 120, 41)),
    )
    with plt.rc_context({"svg.hashsalt": "lattqe", "svg.fonttype": "none", "figure.constrained_layout.use": True}):
        drawing, axes = plt.subplots(1, len(panels), figsize=(11, 3.2))
        for axis, (values, title, bins) in zip(axes, panels):
            for (name, one), colour in zip(compared.items(), ("#0072b2", "#d55e00")):
                shown = np.clip(one[DRAWN][values], bins[0], bins[-1])  # the few beyond stand in the last bin
                axis.hist(shown, bins, density=True, histtype="step", color=colour, label=name)
            axis.set(xlabel=title, ylabel="density")
        shares = [f"{one['first neighbor of the same class']:.0%} of {name}" for name, one in compared.items()]
        axes[0].set_title("of the same class: " + ", ".join(shares), fontsize=8)
        axes[1].set_title(
            ", ".join(f"{one['classes']} classes of {name}" for name, one in compared.items()), fontsize=8
        )
        axes[0].legend(loc="upper left", fontsize=8, frameon=False)
        drawing.savefig(path, format="svg", metadata={"Date": None})
        plt.close(drawing)


def without_drawn(compared: dict[str, Any]) -> dict[str, Any]:
    """What can be printed of a comparison."""
    return {name: {key: value for key, value in one.items() if key != DRAWN} for name, one in compared.items()}


def main() -> None:
    """Compare distractors with the photographs, and draw both."""
    parser = argparse.ArgumentParser(description="Distractors beside the photographs that they are drawn like.")
    parser.add_argument("--data", type=Path, required=True, help="Folder of the photographs' descriptors.")
    parser.add_argument("--columns", type=int, default=128)
    parser.add_argument("--to", type=Path, required=True, help="The figure, an SVG.")
    given = parser.parse_args()
    splits = [load_photos(name, "test", given.data, columns=given.columns) for name in PHOTO_SETS]
    labels = np.concatenate([each.labels for each in splits])
    rows = np.concatenate([each.xb for each in splits])
    blocks = list(draw(donors(given.data, given.columns), len(rows)))
    drawn = (np.concatenate([block for block, _ in blocks]), np.concatenate([numbers for _, numbers in blocks]))
    compared = compare((rows, labels), drawn)
    figure(compared, given.to)
    print(json.dumps(without_drawn(compared)))


if __name__ == "__main__":
    main()
