"""Runs that need no file: each preset says in one place what it is, which options it takes, and how its run is made."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any

from lattqe.benchmark.density import RELEVANT, DensityCell, density_run, load_own_set, load_photo_sets, make_cells
from lattqe.benchmark.spec import (
    Candidate,
    Dataset,
    Distractors,
    GraphCandidate,
    Pipeline,
    Run,
    Setting,
    as_trained,
    graph_candidate,
    tuned,
    with_hops,
)
from lattqe.datasets.labelled import PHOTO_SETS, load_photos, photos_in
from lattqe.datasets.prepare import Report, store, store_synthetic
from lattqe.datasets.revisited import save_gnd
from lattqe.datasets.synthetic import SyntheticWorld
from lattqe.errors import LattqeError
from lattqe.expansion import METHODS
from lattqe.expansion.diffusion import Propagation
from lattqe.store import FeatureSet, FeatureWriter, open_place
from lattqe.store.local import scratch_folder
from lattqe.store.models import model_address

PHOTO_COLUMNS = 128  # trains in minutes on two cores
DENSITY_COLUMNS = (128, 512)
# nDBA and the nQE with it for classes of fifty and more images, where augmentation is worth more neighbors.
PHOTO_DBA = {
    "aqe": ((4, 8, 12), (2, 4, 8)),
    "aqewd": ((8, 12, 16, 24, 36), (8, 12, 16, 24)),
    "dqe": ((4, 8, 12), (4, 8, 12)),
    "alphaqe": ((8, 16, 24, 36), (8, 16, 24)),
}


@dataclass(frozen=True)
class PresetOptions:
    """What the command line gives a preset; None where it does not."""

    folder: str
    data: str | None = None
    model: str | None = None
    columns: tuple[int, ...] | None = None
    features: tuple[str, ...] | None = None
    queries: tuple[str, ...] | None = None
    relevant: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Preset:
    """A run that has a name: a line for its help, the options it takes, and how it is made.

    What `density` says of its run is not what the others say: `cells` are the data sets that its report speaks of.
    """

    line: str
    takes: tuple[str, ...]
    make: Callable[[PresetOptions], Run]
    cells: Callable[[PresetOptions], list[DensityCell]] | None = None


def competitors() -> list[Candidate]:
    """Every method without learning, over what it says is worth trying, tuned on test as the paper did."""
    return [tuned(name) for name, method in METHODS.items() if not method.learned]


def photo_competitors() -> list[Candidate]:
    """The same for classes of fifty and more images."""
    return [
        replace(one, ndba=PHOTO_DBA[one.method][0], nqe_with_dba=PHOTO_DBA[one.method][1])
        if one.method in PHOTO_DBA
        else one
        for one in competitors()
    ]


def paper_competitors() -> list[Candidate]:
    """The same with α, C and negatives settled for augmented databases by themselves, as Table 3 has them."""
    return [replace(one, own_dba=True) for one in competitors()]


# Figure 3 shows αQE with these powers, figure 4 these settings.
PAPER_ALPHAS = tuple((f"αQE, α = {alpha:g}", Setting("alphaqe", 1, (("alpha", alpha),))) for alpha in (2.0, 3.0, 4.0))
PAPER_REGIMES = (
    Setting("aqe", 4),
    Setting("aqewd", 4),
    Setting("dqe", 4, (("C", 0.1), ("negatives", 5))),
    Setting("alphaqe", 72, (("alpha", 3.0),)),
    Setting("lattqe", 64),
)


def graph_rivals() -> tuple[GraphCandidate, ...]:
    """What a user with a neighbor graph would pick instead of DBA: diffusion, alone and after DBA + QE; propagation."""
    decay = METHODS["aqewd"]
    before = Pipeline(Setting("aqewd", 12), Setting("aqewd", 8))
    after = f"{decay.dba_label} + {decay.label} + "
    alone: dict[str, Any] = {"kq": (5, 10), "kd": (20, 30), "gamma": (3.0,), "alpha": (0.9, 0.99)}
    behind: dict[str, Any] = {"kq": (10, 20), "kd": (20, 30), "gamma": (6.0,), "alpha": (0.9, 0.97)}
    return (
        graph_candidate("diffusion", "test", **alone),
        graph_candidate("diffusion", "test", f"{after}diffusion", before, **behind),
        graph_candidate("offline-diffusion", "test", kq=(5, 10), kd=(20,), gamma=(3.0,), alpha=(0.9, 0.99)),
        graph_candidate(
            "offline-diffusion",
            "test",
            f"{after}offline diffusion",
            before,
            kq=(10, 20),
            kd=(20,),
            gamma=(6.0,),
            alpha=(0.9,),
        ),
        graph_candidate("propagation", "test", f"propagation + {decay.label}", Pipeline(qe=Setting("aqewd", 12))),
    )


def fixed_rivals() -> tuple[GraphCandidate, ...]:
    """The same for landmarks, with one setting each: diffusion as published, the rest as the paper and we have it.

    That is kq 10, kd 50, γ 3 and α 0.99 (Iscen et al. 2017), the same cut to 1,000 rows (Yang et al. 2019), propagation
    with its defaults, and ADBAwD 4 + AQEwD 6.
    """
    decay = METHODS["aqewd"]
    before = Pipeline(Setting("aqewd", 4), Setting("aqewd", 6))
    after = f"{decay.dba_label} + {decay.label} + "
    published: dict[str, Any] = {"kq": (10,), "kd": (50,), "gamma": (3.0,), "alpha": (0.99,)}
    own: dict[str, Any] = {name: (each.default,) for name, each in Propagation.parameters().items()}
    return (
        graph_candidate("diffusion", "fixed", **published),
        graph_candidate("diffusion", "fixed", f"{after}diffusion", before, **published),
        graph_candidate("offline-diffusion", "fixed", **published, truncation=(1000,)),
        graph_candidate(
            "offline-diffusion", "fixed", f"{after}offline diffusion", before, **published, truncation=(1000,)
        ),
        graph_candidate("propagation", "fixed", **own),
        graph_candidate("propagation", "fixed", f"propagation + {decay.label}", Pipeline(qe=before.qe), **own),
    )


def all_methods(model: str | None, others: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """The competitors and LAttQE with the numbers its training chose; the model that ships where none is named."""
    return (*others, as_trained(model_address(model)))


def photo_sets(data: str | None, folder: str, columns: int) -> tuple[list[Dataset], list[Distractors]]:
    """The test splits of the photographs as feature sets, each with the other three as its distractors."""
    with photos_in(data) as source:
        splits = [load_photos(name, "test", source, columns=columns) for name in PHOTO_SETS]
    prefix = f"{folder}/features/{columns}"
    datasets, distractors = [], []
    for name, split in zip(PHOTO_SETS, splits):
        origin: dict[str, object] = {"photos": name, "split": "test", "columns": columns}
        database = store(f"{prefix}/{name}", [(split.xb, split.ids, split.labels)], columns, origin)
        queries = store(f"{prefix}/{name}-queries", [(split.xq, split.query_ids, split.query_labels)], columns, origin)
        datasets.append(Dataset(name, database.uri, queries.uri))
    for name in PHOTO_SETS:
        rest = [FeatureSet.open(f"{prefix}/{other}") for other in PHOTO_SETS if other != name]
        uri = unlabelled(f"{prefix}/{name}-others", rest, {"photos": f"all but {name}", "columns": columns})
        distractors.append(Distractors("others", uri, of=name))
    return datasets, distractors


def unlabelled(uri: str, sets: Sequence[FeatureSet], source: dict[str, object]) -> str:
    """The rows of some feature sets as one without labels, unless it is there already; its address."""
    writer = FeatureWriter(uri, sets[0].dim, "float32", labels=False, config=source)
    if writer.finished is None:
        with writer:
            for each in sets:
                writer.append(each.read(), each.ids())
    return uri


def photos_run(options: PresetOptions) -> Run:
    """Four sets of photographs, each also with the other three as distractors; the first columns of the vectors."""
    columns = options.columns or (PHOTO_COLUMNS,)
    if len(columns) > 1:
        raise LattqeError(f"the photos preset measures one width at a time, not {len(columns)}: give one --columns")
    datasets, distractors = photo_sets(options.data, options.folder, columns[0])
    methods = all_methods(options.model, photo_competitors())
    return Run(
        "Photographs: birds, cars, groceries, objects",
        tuple(datasets),
        methods,
        tuple(distractors),
        graph_methods=(*graph_rivals(), *with_hops(methods)),
    )


def synthetic_run(
    folder: str,
    methods: tuple[Candidate, ...],
    world: SyntheticWorld | None = None,
    rivals: tuple[GraphCandidate, ...] = (),
) -> Run:
    """Landmarks with few relevant images (like Oxford) and with many (like Paris), with and without distractors."""
    world = world or SyntheticWorld()
    base = f"{folder.rstrip('/')}/features"
    place, made, datasets = open_place(base), Report(), []
    for name in ("oxford", "paris"):
        split = world.split(name)
        store_synthetic(split, base, made)
        if not place.exists(f"gnd_{name}.json"):
            with scratch_folder("benchmark") as scratch:
                save_gnd(scratch / "gnd.json", split.revisited())
                place.write(f"gnd_{name}.json", (scratch / "gnd.json").read_bytes())
        datasets.append(Dataset(name, f"{base}/{name}", f"{base}/{name}-queries", f"{base}/gnd_{name}.json"))
    store_synthetic(world.split("distractors"), base, made)
    distractors = (Distractors("distractors", f"{base}/distractors"),)
    on_graph = (*rivals, *with_hops(methods))
    return Run("Synthetic landmarks", tuple(datasets), methods, distractors, graph_methods=on_graph)


def revisited_run(options: PresetOptions) -> Run:
    """Revisited Oxford and Paris with a million distractors, for those who have the features.

    `data` holds roxford5k, roxford5k-queries, rparis6k, rparis6k-queries and (optionally) r1m as feature sets, and
    gnd_roxford5k.pkl and gnd_rparis6k.pkl as published; a folder or an s3:// address.
    """
    if options.data is None:
        raise LattqeError("the features of roxford5k and rparis6k are needed: give their folder with --data")
    data = options.data.rstrip("/")
    datasets = tuple(
        Dataset(name, f"{data}/{name}", f"{data}/{name}-queries", f"{data}/gnd_{name}.pkl")
        for name in ("roxford5k", "rparis6k")
    )
    there = open_place(f"{data}/r1m").exists("manifest.json")
    methods = all_methods(options.model, paper_competitors())
    return Run(
        "Revisited Oxford and Paris",
        datasets,
        methods,
        (Distractors("r1m", f"{data}/r1m"),) if there else (),
        graph_methods=(*fixed_rivals(), *with_hops(methods)),
        published=True,
        more_sweeps=PAPER_ALPHAS,
        regime_settings=PAPER_REGIMES,
    )


@lru_cache(maxsize=1)  # the run and its report ask for the same ones
def density_cells(options: PresetOptions) -> list[DensityCell]:
    """The photographs, or a user's own labelled sets, cut to all densities."""
    if options.features is None:
        if options.queries is not None:
            raise LattqeError("--queries need --features: give both")
        sets = load_photo_sets(options.data, options.columns or DENSITY_COLUMNS)
    elif options.data is not None or options.columns is not None:
        raise LattqeError("--features are your own sets, used whole: leave --data and --columns out")
    else:
        queries: tuple[str | None, ...] = options.queries or (None,) * len(options.features)
        if len(queries) != len(options.features):
            raise LattqeError(
                f"{len(queries)} --queries for {len(options.features)} --features: give one for each, or "
                "none to hold some images out"
            )
        sets = [load_own_set(features, asked) for features, asked in zip(options.features, queries)]
        names = [one.name for one in sets]
        if len(set(names)) < len(names):
            raise LattqeError(f"two of the --features end in the same name ({', '.join(names)}): rename one folder")
    return make_cells(sets, options.folder, options.relevant or RELEVANT)


PRESETS: dict[str, Preset] = {
    "revisited": Preset(
        "Revisited Oxford and Paris, for those who have the features", ("data", "model"), revisited_run
    ),
    "photos": Preset("four sets of photographs", ("data", "model", "columns"), photos_run),
    "synthetic": Preset(
        "synthetic landmarks, generated for the run",
        ("model",),
        lambda options: synthetic_run(options.folder, all_methods(options.model, competitors()), rivals=fixed_rivals()),
    ),
    "density": Preset(
        "will it help my collection? Labelled sets cut to 1, 2, 4, 8, 16 and all relevant images",
        ("data", "model", "columns", "features", "queries", "relevant"),
        lambda options: density_run(density_cells(options), model_address(options.model)),
        density_cells,
    ),
}


def preset_run(name: str, options: PresetOptions) -> Run:
    """The run of a preset; data that it makes or cuts go to `folder`/features. Options it does not take are refused."""
    preset = PRESETS[name]
    for option in (each.name for each in fields(options) if each.name != "folder"):
        if getattr(options, option) is not None and option not in preset.takes:
            having = [other for other, each in PRESETS.items() if option in each.takes]
            raise LattqeError(
                f"the preset {name} takes no --{option}, which belongs to {', '.join(having)}: leave it out"
            )
    return preset.make(replace(options, folder=options.folder.rstrip("/")))
