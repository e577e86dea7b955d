"""Images → a feature set: a ResNet-GeM (or any encoder) over a folder, a list file or a bucket, at several scales."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jobs.console import command, human_bytes, print_json, progress_bar, run, screen, show_table
from lattqe.errors import LattqeError

if TYPE_CHECKING:
    from lattqe.extraction.image import Framing
    from lattqe.extraction.sources import ImageList
    from lattqe.extraction.stage import Destination

PROBE_SIDE = 224  # the size that most encoders were made at
SHOWN_BAD = 5


def main(
    images: Annotated[str, typer.Argument(help="folder, s3://bucket/prefix, or list file with one path on each line")],
    to: Annotated[str, typer.Option(help="where to write the features: folder or s3://bucket/prefix")],
    checkpoint: Annotated[str | None, typer.Option(help="network file: .pth, torch.export or TorchScript")] = None,
    encoder: Annotated[str | None, typer.Option(help="module:function that returns an encoder")] = None,
    scales: Annotated[str | None, typer.Option(help="relative sizes, averaged; default 1,0.7071,1.4142")] = None,
    size: Annotated[int, typer.Option(help="limit of the long side in pixels")] = 1024,
    center_crop: Annotated[int | None, typer.Option(help="instead: central square, scaled to this side")] = None,
    gnd: Annotated[Path | None, typer.Option(help="revisited ground truth: take its images, in its order")] = None,
    queries: Annotated[bool, typer.Option("--queries", help="with --gnd: its queries, cropped to bbx")] = False,
    root: Annotated[str | None, typer.Option(help="folder that a list file's paths are relative to")] = None,
    labels_from_folders: Annotated[bool, typer.Option("--labels-from-folders",
                                                      help="label each image by its top folder")] = False,
    max_bad: Annotated[str | None, typer.Option(
        help="bad images to tolerate, as a number or fraction; default 0.1, with --gnd 0")] = None,
    max_pixels: Annotated[int, typer.Option(help="refuse larger images by their header, undecoded")] = 89_000_000,
    exif: Annotated[bool, typer.Option("--exif/--no-exif", help="turn images upright by their EXIF tag")] = True,
    mean: Annotated[str | None, typer.Option(help="R,G,B mean of the encoder's input; default: its own")] = None,
    std: Annotated[str | None, typer.Option(help="R,G,B deviation of the encoder's input; default: its own")] = None,
    dtype: Annotated[str, typer.Option(help="float16 or float32")] = "float16",
    batch: Annotated[int, typer.Option(help="images of one size to encode together")] = 1,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda")] = "auto",
    workers: Annotated[int | None, typer.Option(help="networks at work; default one for each GPU or CPU")] = None,
    address: Annotated[str | None, typer.Option(help="Ray cluster to join; default: this machine")] = None,
) -> None:
    """Describe every image by one unit vector; bad files are listed in skipped.csv, and a killed run continues.

    Example: lattqe extract photos --checkpoint gl18-tl-resnet101-gem-w.pth --to features
    """
    from lattqe.extraction.encoder import EncoderSpec
    from lattqe.extraction.image import Framing
    from lattqe.extraction.multiscale import parse_scales

    if queries and gnd is None:
        raise LattqeError("--queries needs --gnd, which names them and their crops")
    spec = EncoderSpec(_absolute(checkpoint), encoder, _rgb(mean, "--mean"), _rgb(std, "--std"))
    framing = Framing(size, center_crop, exif, max_pixels)
    chosen = parse_scales(scales or ("1" if center_crop else "1,0.7071,1.4142"))
    limit = max_bad if max_bad is not None else ("0.1" if gnd is None else "0")
    listed, inputs = _list(images, root, gnd, queries, to)
    config: dict[str, Any] = {**asdict(framing), "scales": list(chosen), "batch": batch, "transparency": "over white",
                              "crop": "bbx, at the scale of the full image" if queries else None,
                              "labels": "top folders" if labels_from_folders else None}
    _extract(spec, framing, chosen, listed, inputs, config, to=to, dtype=dtype, batch=batch, device=device,
             tolerated=bad_limit(limit, len(listed)), workers=workers, address=address)


def _absolute(path: str | None) -> str | None:
    """Workers may be started in another folder."""
    return path if path is None or "://" in path else str(Path(path).expanduser().absolute())


def _rgb(text: str | None, option: str) -> tuple[float, ...] | None:
    if text is None:
        return None
    try:
        values = tuple(float(part) for part in text.split(","))
    except ValueError:
        values = ()
    if len(values) != 3 or (option == "--std" and min(values) <= 0):
        raise LattqeError(f"{option} {text!r} is not three numbers: give for example 0.485,0.456,0.406")
    return values


def bad_limit(text: str, images: int) -> int:
    """How many bad images are tolerated: '20' is twenty, '0.05' and '5%' a twentieth of all."""
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        value = -1.0
    fraction = "." in text or text.endswith("%")
    if not 0 <= value <= (1 if fraction else float("inf")):
        raise LattqeError(f"--max-bad {text!r} is neither a number (20) nor a fraction (0.05 or 5%)")
    return int(value * images) if fraction else int(value)


def _list(images: str, root: str | None, gnd: Path | None, queries: bool,
          to: str) -> tuple["ImageList", dict[str, dict[str, str]]]:
    """The images and how the manifest names them."""
    import xxhash

    from lattqe.datasets.revisited import load_gnd
    from lattqe.extraction.sources import list_ground_truth, list_images
    from lattqe.store import open_place

    place, target = open_place(images), open_place(to)
    if f"{target.uri}/".startswith(f"{place.uri}/"):
        raise LattqeError(f"{to} lies within {images}: the features would be taken for images next time")
    inputs = {}
    if gnd is not None:
        listed = list_ground_truth(images, load_gnd(gnd), queries)
        inputs["gnd"] = {"uri": str(gnd), "digest": xxhash.xxh3_128_hexdigest(gnd.read_bytes()), "kind": "ground truth"}
    else:
        listed = list_images(images, root)
    inputs["images"] = {"uri": place.uri, "digest": listed.digest(), "kind": "images"}
    return listed, inputs


def _extract(spec: Any, framing: "Framing", scales: tuple[float, ...], listed: "ImageList",
             inputs: dict[str, dict[str, str]], config: dict[str, Any], *, to: str, dtype: str, batch: int,
             device: str, tolerated: int, workers: int | None, address: str | None) -> None:
    import torch

    from cluster.extraction import ExtractionTask, plan_workers
    from cluster.session import ray_session
    from lattqe.extraction.encoder import open_encoder
    from lattqe.extraction.stage import Destination
    from lattqe.store.tables import check_dtype

    opened = open_encoder(spec, torch.device("cpu"))
    dim = opened.output_dim(framing.center_crop or PROBE_SIDE)
    config = {**config, "encoder": opened.kind, "mean": list(opened.mean), "std": list(opened.std),
              "scale_power": opened.scale_power}
    inputs["encoder"] = {"uri": spec.checkpoint or spec.hook, "digest": opened.digest, "kind": opened.kind}
    destination = Destination(to, dim, check_dtype(dtype), config, inputs)
    finished = destination.find_finished()
    if finished is not None:
        screen.print(f"{to} is finished already: {finished.rows} rows")
        print_json({"uri": to, "rows": finished.rows, "dim": dim, "skipped": finished.config["skipped"]})
        return
    pending = destination.begin(listed)
    blocks = pending.missing()
    task = ExtractionTask(destination.stage_uri, listed.root, spec, framing, scales, batch, dim, destination.dtype)
    if blocks:
        with ray_session(address):
            planned = plan_workers(workers, device)
            show_table("extract", {
                "images": len(listed), "encoder": f"{opened.kind}, {dim}-D",
                "scales": ", ".join(f"{scale:.4g}" for scale in scales),
                "blocks": f"{len(blocks)} of {len(pending.part_rows)} to do",
                "workers": f"{min(planned.count, len(blocks))} × {planned.device}, {planned.cpus} threads each",
                "features": f"{to}, about {human_bytes(len(listed) * dim * (2 if dtype == 'float16' else 4))}"})
            _run_blocks(task, planned, blocks, pending.part_rows, tolerated)
    pending.finish()
    _publish(destination, listed, tolerated)


def _run_blocks(task: Any, planned: Any, blocks: list[int], part_rows: list[int], tolerated: int) -> None:
    """Describe the missing blocks, and stop early once too many images are bad."""
    from cluster.extraction import BlockReport, extract_blocks

    bad: list[tuple[str, str]] = []
    total = sum(part_rows)
    with progress_bar("extract", total, done=total - sum(part_rows[block] for block in blocks)) as bar:
        def on_done(report: BlockReport) -> None:
            bad.extend(report.bad)
            _check_bad(bad, total, tolerated, "")
            bar.advance(report.images, f"{len(bad)} bad" if bad else "")

        extract_blocks(task, planned, blocks, on_done)


def _check_bad(bad: list[tuple[str, str]], images: int, tolerated: int, where: str) -> None:
    if len(bad) > tolerated:
        shown = "; ".join(f"{identifier}: {reason}" for identifier, reason in bad[:SHOWN_BAD])
        more = f"; and {len(bad) - SHOWN_BAD} more" if len(bad) > SHOWN_BAD else ""
        raise LattqeError(f"{len(bad)} of {images} images are bad and --max-bad allows {tolerated} ({shown}{more})"
                          f"{where}: mend them, or run again with a higher --max-bad to continue from here")


def _publish(destination: "Destination", listed: "ImageList", tolerated: int) -> None:
    """Gather the blocks into the feature set, unless too many images were bad."""
    import numpy as np

    from lattqe.extraction.sources import folder_labels
    from lattqe.extraction.stage import SKIPPED_NAME, DescribedImages, find_skipped, merge
    from lattqe.store import open_place

    described = DescribedImages.open(destination.stage_uri)
    skipped = find_skipped(described)
    bad = [(identifier, reason) for _, identifier, reason in skipped.rows]
    if len(bad) > tolerated:
        open_place(destination.uri).write(SKIPPED_NAME, skipped.to_csv())
        _check_bad(bad, len(listed), tolerated, f", all listed in {destination.uri}/{SKIPPED_NAME}")
    labels = np.array(folder_labels(listed)) if destination.config["labels"] else None
    crops = None
    if destination.config["crop"]:
        crops = np.array([entry.box or (0, 0, 0, 0) for entry in listed.entries()], dtype=np.float32)
    manifest = merge(destination, described, skipped, labels, crops)
    show_table("features", {"at": destination.uri, "rows": manifest.rows, "dim": destination.dim,
                            "skipped": f"{len(bad)} (see {SKIPPED_NAME})" if bad else 0,
                            "bytes": human_bytes(manifest.total_bytes)})
    print_json({"uri": destination.uri, "rows": manifest.rows, "dim": destination.dim, "skipped": len(bad)})


app = command(main)

if __name__ == "__main__":
    run(app)
