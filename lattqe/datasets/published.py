"""The paper's published numbers, shipped as `published.json`, to stand beside one's own."""

import json
from functools import cache
from importlib import resources
from typing import Any


@cache
def published() -> dict[str, Any]:
    """Everything in the file, in percent. Treat it as read-only.

    golden: no-expansion results of the paper's features, which must come out before anything else is compared.
    table2: ablations; table3: all methods, `kind` none, qe or dba+qe, by set ('roxford5k', 'roxford5k+r1m', ...) and
    setup; figure4: relative gains `by_positives` and `by_ap_before`, three groups for each setup. Figure 3 was
    published as a drawing only.
    """
    return json.loads(resources.files(__package__).joinpath("published.json").read_text(encoding="utf-8"))


def golden_differences(dataset: str, measured: dict[str, float], tolerance: float = 0.1) -> list[str]:
    """Compare no-expansion mAP in percent by setup with the golden numbers; returns one line for each that differs.

    dataset: 'roxford5k' or 'rparis6k'. The tolerance allows for rounding of the descriptors to float16.
    """
    golden = published()["golden"]["map"][dataset]
    return [
        f"{dataset} {setup}: mAP {measured[setup]:.2f} without expansion, {value:.2f} expected of the paper's features"
        for setup, value in golden.items()
        if setup in measured and abs(measured[setup] - value) > tolerance
    ]
