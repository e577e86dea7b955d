"""The course of a training for the eye: a figure, and TensorBoard events."""

import io
import tempfile
from pathlib import Path
from typing import Any

History = list[dict[str, Any]]


def learning_curve(history: History) -> bytes:
    """An SVG of the loss and of each validation set's mAP over the updates of the first stage."""
    import matplotlib
    from matplotlib.figure import Figure

    entries = [entry for entry in history if entry["stage"] == "network" and "loss" in entry]
    # A fixed salt and no date: equal curves are equal files.
    with matplotlib.rc_context({"svg.hashsalt": "lattqe", "svg.fonttype": "none"}):
        figure = Figure(figsize=(8, 3.2), layout="constrained")
        left, right = figure.subplots(1, 2)
        left.plot([e["step"] for e in entries], [e["loss"] for e in entries], color="#444444")
        left.set(xlabel="updates", ylabel="loss", title="training loss")
        validated = [entry for entry in history if "map" in entry]
        for k in validated[-1]["map"] if validated else ():
            values = [entry["map"][k]["mean"] for entry in validated]
            right.plot([entry["step"] for entry in validated], values, marker="o", markersize=3, label=f"{k} neighbors")
        right.set(xlabel="updates", ylabel="mAP (%)", title="validation, mean of the sets")
        if validated:
            right.legend(frameon=False)
        for axes in (left, right):
            axes.spines[["top", "right"]].set_visible(False)
            axes.grid(alpha=0.3)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()


def tensorboard_events(history: History) -> bytes:
    """A TensorBoard event file of the whole history; a longer history gives a file that begins with the shorter's."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.record_writer import RecordWriter

    started = history[0]["time"] if history else 0.0
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "events"
        with path.open("wb") as file:
            writer = RecordWriter(file)
            writer.write(Event(wall_time=started, file_version="brain.Event:2").SerializeToString())
            for entry in history:
                summary = Summary(value=[Summary.Value(tag=tag, simple_value=value) for tag, value in _scalars(entry)])
                event = Event(wall_time=entry["time"], step=entry["step"], summary=summary)
                writer.write(event.SerializeToString())
            writer.flush()
        return path.read_bytes()


def _scalars(entry: dict[str, Any]) -> list[tuple[str, float]]:
    """The numbers of one entry by tag."""
    outside = ("step", "stage", "time", "seconds", "map")
    scalars = [(f"train/{name}", value) for name, value in entry.items() if name not in outside]
    for k, found in entry.get("map", {}).items():
        scalars += [(f"validation@{k}/{name}", value) for name, value in found.items()]
    return scalars
