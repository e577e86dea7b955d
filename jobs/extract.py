"""Images → a feature set: a ResNet-GeM (or any encoder) over a folder, a list file or a bucket, at several scales."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from jobs.console import command, human_bytes, print_json, progress_bar, run, screen, show_table
from jobs.plan import Assume, Plan, setting, tell
from lattqe.errors import LattqeError

if TYPE_CHECKING:
    from cluster.extraction import WorkerPlan
    from lattqe.cost import Work
    from lattqe.cost.plans import Placement
    from lattqe.extraction.encoder import EncoderSpec, ImageEncoder
    from lattqe.extraction.image import Framing, ImageList
    from lattqe.extraction.stage import Destination
    from lattqe.store import Manifest

PROBE_SIDE = 224  # the size that most encoders were made at
SHOWN_BAD = 5
HOW_TO_DESCRIBE = (
    "a published ResNet-GeM file:  lattqe extract photos --checkpoint gl18-tl-resnet101-gem-w.pth --to features",
    "a backbone and its weights:   lattqe extract photos --model timm:vit_base_patch14_dinov2 --weights "
    "dinov2.safetensors --to features",
    "existing descriptors:         lattqe import vectors.npy --ids names.txt --to features",
)

FolderLabels: TypeAlias = tuple[list[int], list[str]]  # of each image, and the folders' names

CenterCrop = Annotated[
    int | None,
    typer.Option(
        help="instead of --size: central square, scaled to this side; default with --model: its package's value"
    ),
]
ByFolder = Annotated[bool, typer.Option("--labels-from-folders", help="label each image by its top folder")]
MaxBad = Annotated[
    str | None, typer.Option(help="bad images to tolerate, as a number or fraction; default 0.1, with --gnd 0")
]


def main(
    images: Annotated[str, typer.Argument(help="folder, s3://bucket/prefix, or list file with one path per line")],
    to: Annotated[str, typer.Option(help="where to write the features: folder or s3://bucket/prefix")],
    checkpoint: Annotated[str | None, typer.Option(help="network file: .pth, torch.export or TorchScript")] = None,
    model: Annotated[str | None, typer.Option(help="backbone: timm:NAME, torchvision:NAME or open_clip:NAME")] = None,
    weights: Annotated[str | None, typer.Option(help="with --model: its state dict, .safetensors or .pth")] = None,
    pool: Annotated[str, typer.Option(help="with --model: cls, gem or mean; default: cls, else gem")] = "auto",
    encoder: Annotated[str | None, typer.Option(help="module:function that returns an encoder")] = None,
    scales: Annotated[str | None, typer.Option(help="relative sizes, averaged; default 1,0.7071,1.4142")] = None,
    size: Annotated[int | None, typer.Option(help="limit of the long side in pixels; default 1024")] = None,
    center_crop: CenterCrop = None,
    gnd: Annotated[Path | None, typer.Option(help="revisited ground truth: use its images, in its order")] = None,
    queries: Annotated[bool, typer.Option("--queries", help="with --gnd: its queries, cropped to bbx")] = False,
    root: Annotated[str | None, typer.Option(help="folder that a list file's paths are relative to")] = None,
    labels_from_folders: ByFolder = False,
    max_bad: MaxBad = None,
    max_pixels: Annotated[int, typer.Option(help="skip images that are larger according to their header")] = 89_000_000,
    exif: Annotated[bool, typer.Option("--exif/--no-exif", help="rotate images according to their EXIF tag")] = True,
    mean: Annotated[str | None, typer.Option(help="R,G,B mean of the input; default: the encoder's")] = None,
    std: Annotated[str | None, typer.Option(help="R,G,B deviation of the input; default: the encoder's")] = None,
    dtype: Annotated[str, typer.Option(help="float16 or float32")] = "float16",
    batch: Annotated[int, typer.Option(help="images of equal size to encode together")] = 1,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda")] = "auto",
    workers: Annotated[int | None, typer.Option(help="each with a network; default: one per GPU or CPU")] = None,
    address: Annotated[str | None, typer.Option(help="Ray cluster to join; default: this machine")] = None,
    plan: Plan = False,
    assume: Assume = None,
    json: Annotated[bool, typer.Option("--json", help="print the result as JSON on stdout")] = False,
) -> None:
    """Compute one unit vector for every image; bad files are listed in skipped.csv, and a killed run continues.

    Example: lattqe extract photos --checkpoint gl18-tl-resnet101-gem-w.pth --to features
    """
    from cluster.extraction import plan_workers
    from cluster.session import ray_session
    from lattqe.extraction.image import folder_labels
    from lattqe.store import open_place

    _check_asked(checkpoint or encoder or model, queries, gnd)
    listed, inputs = _list(images, root, gnd, queries, to)
    tolerated = bad_limit(max_bad or ("0.1" if gnd is None else "0"), len(listed))
    spec = _spec(checkpoint, encoder, mean, std, model, weights, pool)
    settings, opened = _settings(spec, (size, center_crop, exif, max_pixels), scales, batch, dtype)
    labels = folder_labels(listed) if labels_from_folders else None
    destination = _prepare(settings, opened, to, queries, labels_from_folders, inputs)
    if (where := setting(plan, assume, len(listed), workers, address, always_on_ray=True)) is not None:
        where = on_device(where, device)
        tell([planned(settings, opened, destination, listed, where)], where, not open_place(to).is_local, json)
        return
    finished = destination.find_finished()
    if finished is None:
        with ray_session(address):
            finished = _make(settings, destination, listed, labels, plan_workers(workers, device), tolerated)
    _show_result(to, finished, destination.dim, json)


def _check_asked(network: str | None, queries: bool, gnd: Path | None) -> None:
    """Refuse what names no network, or queries of nothing."""
    if network is None:
        screen.print("\n".join(HOW_TO_DESCRIBE), markup=False, soft_wrap=True)
        raise LattqeError("no network given: above are three ways to get descriptors")
    if queries and gnd is None:
        raise LattqeError("--queries needs --gnd, which defines them and their crops")


def _show_result(to: str, finished: "Manifest", dim: int, json: bool) -> None:
    show_table(
        "features",
        {
            "at": to,
            "rows": finished.rows,
            "dim": dim,
            "skipped": f"{finished.config['skipped']}, listed in skipped.csv",
            "bytes": human_bytes(finished.total_bytes),
        },
    )
    if json:
        print_json({"uri": to, "rows": finished.rows, "dim": dim, "skipped": finished.config["skipped"]})


def on_device(where: "Placement", device: str) -> "Placement":
    """The machines as `--device` uses them."""
    if device == "cuda" and not where.machines.gpus:
        raise LattqeError("--device cuda, but the planned machines have no GPU: assume gpus=1, or use --device cpu")
    return replace(where, machines=replace(where.machines, gpus=0)) if device == "cpu" else where


def planned(
    settings: "Settings", opened: "ImageEncoder", destination: "Destination", listed: "ImageList", where: "Placement"
) -> "Work":
    """What the extraction takes: the network's operations are counted on one small image and grow with its area."""
    import numpy as np
    from torch.utils.flop_counter import FlopCounterMode

    from lattqe.cost.stages import extraction
    from lattqe.extraction.stage import block_rows

    side = settings.framing.center_crop or PROBE_SIDE
    with FlopCounterMode(display=False) as counter:
        opened.output_dim(side)
    pixels = side * side if settings.framing.center_crop else 0.75 * settings.framing.size**2
    area = sum(scale * scale for scale in settings.scales) * pixels / (side * side)
    return extraction(
        len(listed),
        sum(entry.bytes for entry in listed.entries()),
        destination.dim,
        where.machines,
        itemsize=np.dtype(settings.dtype).itemsize,
        flops=counter.get_total_flops() * area,
        block_rows=block_rows(len(listed)),
    )


@dataclass(frozen=True)
class Settings:
    """What every worker is told."""

    encoder: "EncoderSpec"
    framing: "Framing"
    scales: tuple[float, ...]
    batch: int
    dtype: str

    def __post_init__(self) -> None:
        if self.batch < 1:
            raise LattqeError(f"--batch {self.batch} must be at least 1")


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


def _spec(
    checkpoint: str | None,
    hook: str | None,
    mean: str | None,
    std: str | None,
    model: str | None,
    weights: str | None,
    pool: str,
) -> "EncoderSpec":
    """The network that the options name, as every worker can open it."""
    from lattqe.extraction.encoder import EncoderSpec, find_hook_folder

    colours = _rgb(mean, "--mean"), _rgb(std, "--std")
    folder = find_hook_folder(hook) if hook else None
    return EncoderSpec(_absolute(checkpoint), hook, folder, *colours, model, _absolute(weights), pool)


def _settings(
    spec: "EncoderSpec", frame: tuple[int | None, int | None, bool, int], scales: str | None, batch: int, dtype: str
) -> "tuple[Settings, ImageEncoder]":
    """What every worker is told, and the network, opened here once: a wrong one is refused before anything starts."""
    import torch

    from lattqe.extraction.encoder import open_encoder, parse_scales
    from lattqe.store.manifest import check_dtype

    opened = open_encoder(spec, torch.device("cpu"))
    framing = _framing(opened, *frame)
    sizes = parse_scales(scales or ("1" if framing.center_crop else "1,0.7071,1.4142"))
    return Settings(spec, framing, sizes, batch, check_dtype(dtype)), opened


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


def _list(
    images: str, root: str | None, gnd: Path | None, queries: bool, to: str
) -> tuple["ImageList", dict[str, dict[str, str]]]:
    """The images and how the manifest names them."""
    import xxhash

    from lattqe.datasets.revisited import load_gnd
    from lattqe.extraction.image import list_ground_truth, list_images
    from lattqe.store import open_place

    place, target = open_place(images), open_place(to)
    if f"{target.uri}/".startswith(f"{place.uri}/"):
        raise LattqeError(f"{to} is inside {images}: the next run would take the features for images")
    inputs = {}
    if gnd is not None:
        listed = list_ground_truth(images, load_gnd(gnd), queries)
        inputs["gnd"] = {"uri": str(gnd), "digest": xxhash.xxh3_128_hexdigest(gnd.read_bytes()), "kind": "ground truth"}
    else:
        listed = list_images(images, root)
    inputs["images"] = {"uri": place.uri, "digest": listed.digest(), "kind": "images"}
    return listed, inputs


def _framing(opened: "ImageEncoder", size: int | None, crop: int | None, exif: bool, most: int) -> "Framing":
    """How images are brought to the network: as requested, else as a backbone's package says, else by size."""
    from lattqe.extraction.image import Framing

    if crop is None and size is None and opened.side is not None:
        return Framing(1024, opened.side, exif, most, opened.share, opened.filter)
    return Framing(1024 if size is None else size, crop, exif, most)


def _prepare(
    settings: Settings, opened: "ImageEncoder", to: str, crops: bool, by_folder: bool, inputs: dict[str, dict[str, str]]
) -> "Destination":
    """What is going to be made; the encoder's output decides the rows."""
    from lattqe.extraction.image import Framing
    from lattqe.extraction.stage import Destination

    dim = opened.output_dim(settings.framing.center_crop or PROBE_SIDE)
    usual = asdict(Framing())
    # What only backbones ask for is recorded where it is requested: features of earlier versions stay the same.
    framing = {
        name: value
        for name, value in asdict(settings.framing).items()
        if name not in ("share", "filter") or value != usual[name]
    }
    config = {
        "crop": "bbx, at the scale of the full image" if crops else None,
        "labels": "top folders" if by_folder else None,
        **framing,
        "scales": list(settings.scales),
        "batch": settings.batch,
        "transparency": "over white",
        "encoder": opened.kind,
        "mean": list(opened.mean),
        "std": list(opened.std),
        "scale_power": opened.scale_power,
    }
    inputs = {**inputs, "encoder": {"uri": settings.encoder.source, "digest": opened.digest, "kind": opened.kind}}
    return Destination(to, dim, settings.dtype, config, inputs)


def _make(
    settings: Settings,
    destination: "Destination",
    listed: "ImageList",
    labels: FolderLabels | None,
    workers: "WorkerPlan",
    tolerated: int,
) -> "Manifest":
    """Do what is left to do."""
    pending = destination.begin(listed)
    try:
        blocks = pending.missing()
        if blocks:
            _describe(settings, destination, listed, pending.part_rows, blocks, workers, tolerated)
        pending.finish()
        return _publish(destination, listed, labels, tolerated)
    except LattqeError:
        finished = destination.find_finished()  # a twin of this run may have published and cleared up meanwhile
        if finished is None:
            raise
        return finished


def _describe(
    settings: Settings,
    destination: "Destination",
    listed: "ImageList",
    part_rows: list[int],
    blocks: list[int],
    workers: "WorkerPlan",
    tolerated: int,
) -> None:
    """Describe the missing blocks, and stop early once too many images are bad."""
    from cluster.extraction import BlockReport, ExtractionTask, extract_blocks

    show_table(
        "extract",
        {
            "images": len(listed),
            "encoder": f"{destination.config['encoder']}, {destination.dim}-D",
            "scales": ", ".join(f"{scale:.4g}" for scale in settings.scales),
            "blocks": f"{len(blocks)} of {len(part_rows)} to do",
            "workers": f"{min(workers.count, len(blocks))} × {workers.device}, {workers.cpus} threads each",
            "features": f"{destination.uri}, about {human_bytes(len(listed) * destination.row_bytes)}",
        },
        plan=True,
    )
    task = ExtractionTask(
        destination.stage_uri,
        listed.root,
        settings.encoder,
        settings.framing,
        settings.scales,
        settings.batch,
        destination.dim,
        destination.dtype,
    )
    bad: list[tuple[str, str]] = []
    with progress_bar("extract", len(listed), done=len(listed) - sum(part_rows[block] for block in blocks)) as bar:

        def on_done(report: BlockReport) -> None:
            bad.extend(report.bad)
            _check_bad(bad, len(listed), tolerated, "")
            bar.advance(report.images, f"{len(bad)} bad" if bad else "")

        extract_blocks(task, workers, blocks, on_done)


def _check_bad(bad: list[tuple[str, str]], images: int, tolerated: int, where: str) -> None:
    if len(bad) > tolerated:
        shown = "; ".join(f"{identifier}: {reason}" for identifier, reason in bad[:SHOWN_BAD])
        more = f"; and {len(bad) - SHOWN_BAD} more" if len(bad) > SHOWN_BAD else ""
        raise LattqeError(
            f"{len(bad)} of {images} images are bad and --max-bad allows {tolerated} ({shown}{more})"
            f"{where}: fix them, or run again with a higher --max-bad to continue from here"
        )


def _publish(
    destination: "Destination", listed: "ImageList", labels: FolderLabels | None, tolerated: int
) -> "Manifest":
    """Gather the blocks into the feature set, unless too many images were bad."""
    import numpy as np

    from lattqe.extraction.stage import SKIPPED_NAME, DescribedImages, find_skipped, merge
    from lattqe.store import open_place

    described = DescribedImages.open(destination.stage_uri)
    skipped = find_skipped(described)
    bad = [(identifier, reason) for _, identifier, reason in skipped.rows]
    if len(bad) > tolerated:
        open_place(destination.stage_uri).write(SKIPPED_NAME, skipped.to_csv())
        _check_bad(bad, len(listed), tolerated, f", all listed in {destination.stage_uri}/{SKIPPED_NAME}")
    crops = None
    if destination.config["crop"]:
        crops = np.array([entry.box or (0, 0, 0, 0) for entry in listed.entries()], dtype=np.float32)
    numbers, names = (None, None) if labels is None else (np.array(labels[0], np.int32), labels[1])
    return merge(destination, described, skipped, numbers, crops, names)


app = command(main)

if __name__ == "__main__":
    run(app)
