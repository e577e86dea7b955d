"""A loss that is one function and one field is known to settings, training, checkpoints and metrics.

The package is copied, the two are put into the copy, and the copy trains with it.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from training_sets import DIM, TINY

from lattqe.errors import LattqeError
from lattqe.training import preset

PROJECT = Path(__file__).parents[2]
FIELD = "    pull: float = loss(0.0)\n"
ABOVE = "# A new loss is a function above, and the field of TrainingConfig with its weight.\n"
FUNCTION = '''def farness(expanded: torch.Tensor, batch: Batch, config: TrainingConfig) -> torch.Tensor:
    """Distance to the first positive. expanded (b, D); returns (b,)."""
    return (expanded - batch.positives[:, 0]).norm(dim=1)


'''
TRAIN = """
import json, sys
import lattqe.training.loop
from lattqe.store import load_model
from lattqe.training import train
from training_sets import plan_for, write_sets

lattqe.training.loop.learning_curve = lambda history: b"<svg/>"
folder, settings = sys.argv[1], sys.argv[2:]
plan = plan_for(write_sets(folder), f"{folder}/model", *settings)
train(plan)
_, config, metrics, _ = load_model(plan.destination)
print(json.dumps({"training": config["training"], "history": metrics["history"]}))
"""


def put_before(path: Path, mark: str, text: str) -> None:
    """Put a text into a file, before the one place where the mark stands."""
    content = path.read_text()
    assert content.count(mark) == 1
    path.write_text(content.replace(mark, text + mark))


@pytest.mark.slow
def test_a_new_loss_is_one_function_and_one_field(tmp_path: Path) -> None:
    with pytest.raises(LattqeError, match="there is no setting 'farness'"):
        preset("paper", DIM, [*TINY, "farness=0.5"])
    shutil.copytree(PROJECT / "lattqe", tmp_path / "copy" / "lattqe")
    put_before(tmp_path / "copy" / "lattqe" / "training" / "config.py", FIELD, "    farness: float = loss(0.0)\n")
    put_before(tmp_path / "copy" / "lattqe" / "training" / "stage.py", ABOVE, FUNCTION)
    settings = ["farness=0.5", "contrastive=0", "auxiliary=0", "steps=6", "temperature_steps=0"]
    done = subprocess.run(
        [sys.executable, "-c", TRAIN, str(tmp_path), *settings],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{tmp_path / 'copy'}:{PROJECT / 'tests'}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["training"]["farness"] == 0.5
    told = [entry for entry in found["history"] if "loss" in entry]
    assert [entry["step"] for entry in told] == [2, 3, 4, 6]
    for entry in told:  # it is all there is of the loss
        assert entry["farness"] > 0
        assert entry["loss"] == pytest.approx(0.5 * entry["farness"])
        assert not {"contrastive", "auxiliary"} & set(entry)
