"""From arrays to a figure: vectors in, mAP over the number of neighbors out, on a synthetic world of landmarks.

The cells run in a notebook (Jupytext, VS Code) or from top to bottom:

    python docs/examples/arrays_to_figure.py figure.png
"""

# %%
import sys

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

import lattqe

# %% [markdown]
# A database of 1,200 rows of 40 landmarks, one view of each as a query. Your own vectors go here: `xb` (nb, D) and
# `xq` (nq, D), L2-normalised, with labels or a ground-truth file; or addresses of sets that `lattqe import` wrote.

# %%
rng = np.random.default_rng(0)
centres = rng.normal(size=(40, 64))
labels = rng.integers(0, 40, 1200)
xb = centres[labels] + 1.8 * rng.normal(size=(1200, 64))
xq = centres + 1.8 * rng.normal(size=(40, 64))
xb, xq = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in (xb.astype(np.float32), xq.astype(np.float32)))
query_labels = np.arange(40)


def mean_ap(found):
    """MAP in percent of what a search found."""
    return 100 * lattqe.evaluate(found, labels=labels, query_labels=query_labels)["label"].mean_ap


# %% [markdown]
# Without expansion, then with αQE over ever more neighbors, then against the augmented database.

# %%
everything = len(xb)
plain = mean_ap(lattqe.search(xq, xb, everything))
neighbors = (1, 2, 4, 8, 16, 32)
expanded = [mean_ap(lattqe.search(xq, xb, everything, expand="alphaqe", nqe=k)) for k in neighbors]
augmented = lattqe.augment(xb, "alphaqe", 8)
both = [mean_ap(lattqe.search(xq, augmented, everything, expand="alphaqe", nqe=k)) for k in neighbors]
print(f"no expansion {plain:.1f}, αQE {max(expanded):.1f}, αDBA + αQE {max(both):.1f} mAP")

# %%
figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
axes.axhline(plain, color="0.5", linestyle="--", label="no expansion")
axes.plot(neighbors, expanded, "o-", label="αQE")
axes.plot(neighbors, both, "s-", label="αDBA + αQE")
axes.set_xscale("log", base=2)
axes.set_xticks(neighbors, [str(k) for k in neighbors])
axes.set_xlabel("neighbors (nQE)")
axes.set_ylabel("mAP")
axes.legend()
if len(sys.argv) > 1:
    figure.savefig(sys.argv[1], dpi=150)
