"""What the fuzzer does with a damaged file: reads it, and checks that what is accepted is right."""

import io
import json
import random
import shutil
import tomllib
import warnings
import zipfile
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import torch
from fuzz_mutations import mutated, mutated_json
from fuzz_seeds import (
    RUN,
    X,
    cell_seed,
    image_seeds,
    importer_seeds,
    make_things,
    make_work,
    network_file_seeds,
    photo_files,
    sfm_seeds,
    side_seeds,
    truth_seeds,
)

from lattqe.adaptation import Adaptation
from lattqe.benchmark.cells import Measured
from lattqe.benchmark.runfile import load_run, parse_run
from lattqe.datasets.labelled import load_photos, load_sfm120k
from lattqe.datasets.revisited import load_gnd
from lattqe.errors import LattqeError
from lattqe.extraction.image import BadImage, Framing, decode
from lattqe.extraction.resnet import read_checkpoint
from lattqe.formats import open_source
from lattqe.model import LAttQE
from lattqe.store import FeatureSet, FeatureWriter, Manifest, NeighborGraph, Part, load_model, open_artifact, open_place
from lattqe.store import parts as store_parts
from lattqe.store.artifacts import verify_artifact
from lattqe.store.manifest import canonical_json, parse_manifest
from lattqe.training.checkpoint import STATE, Checkpoints
from lattqe.training.loop import learning_curve, tensorboard_events

warnings.simplefilter("ignore")


class Wrong(Exception):
    """A damaged file was accepted, and what came out is not right."""


def check(condition: bool, what: str) -> None:
    if not condition:
        raise Wrong(what)


class Import:
    """A foreign file, from the importer through the writer to the stored vectors."""

    def __init__(self, ending: str, seeds: list[bytes]) -> None:
        self.name, self.ending, self.seeds = f"import {ending}", ending, seeds

    def run(self, folder: Path, rng: random.Random) -> None:
        seed, other = rng.choice(self.seeds), rng.choice(self.seeds)
        path = folder / f"x{self.ending}"
        rezip = self.ending == ".pt" and rng.random() < 0.6
        path.write_bytes(_rezipped(seed, rng, other) if rezip else mutated(seed, rng, other))
        store(folder, [path])


class Side:
    """Ids, labels or flags beside a sound matrix."""

    def __init__(self, ending: str, seeds: list[bytes]) -> None:
        self.name, self.ending, self.seeds = f"beside {ending}", ending, seeds

    def run(self, folder: Path, rng: random.Random) -> None:
        np.save(folder / "x.npy", X)
        path = folder / f"side{self.ending}"
        path.write_bytes(mutated(rng.choice(self.seeds), rng, rng.choice(self.seeds)))
        role = rng.choice(("ids", "labels", "select"))
        store(folder, [folder / "x.npy"], **{role: [str(path)] if role == "select" else path})


def store(folder: Path, paths: list[Path], **options) -> None:
    """Import as the job does and check the result."""
    source = open_source(paths, **options)
    check(source.dim > 0 and source.rows > 0, "a source without rows or columns")
    with FeatureWriter(str(folder / "features"), source.dim, labels=source.has_labels, skip_bad=True) as writer:
        count = 0
        for block in source.blocks(4):
            check(block.vectors.ndim == 2 and block.vectors.shape[1] == source.dim, "blocks of another shape")
            check(block.vectors.dtype.kind == "f", "blocks of another type")
            count += len(block.vectors)
            writer.append(block.vectors, block.ids, block.labels)
        check(count == source.rows, f"{count} rows came, {source.rows} were announced")
    vectors, ids = writer.close().read(), writer.close().ids()
    check(len(set(ids)) == len(vectors), "ids that are not unique")
    check(vectors.shape == (count - writer.skipped, source.dim), "stored in another shape")
    check(bool(np.isfinite(vectors).all()), "stored vectors are not finite")
    lengths = np.linalg.norm(vectors.astype(np.float64), axis=1)
    # Rounding to float16 moves the norm by up to 2^-11, and by more where very many components are subnormal.
    check(bool((np.abs(lengths - 1) < 2e-3).all()), f"stored vectors are not normalised: {lengths}")


class Truth:
    """A ground-truth file."""

    def __init__(self, ending: str, seeds: list[bytes]) -> None:
        self.name, self.ending, self.seeds = f"ground truth {ending}", ending, seeds

    def run(self, folder: Path, rng: random.Random) -> None:
        path = folder / f"gnd{self.ending}"
        seed = rng.choice(self.seeds)
        if self.ending == ".json" and rng.random() < 0.6:
            path.write_text(json.dumps(mutated_json(json.loads(seed), rng)))
        else:
            path.write_bytes(mutated(seed, rng, rng.choice(self.seeds)))
        truth = load_gnd(path)
        check(len(truth.gnd) == len(truth.qimlist) == len(truth.boxes), "lists of different lengths")
        for lists in truth.gnd:
            rows = [row for grade in ("easy", "hard", "junk") for row in lists[grade]]
            check(all(0 <= row < len(truth.imlist) for row in rows), "a row outside of the database")


MODELS = {"network": LAttQE.load, "adaptation": lambda uri: Adaptation.load(uri)[0].apply(X), "model": load_model}


class Stored:
    """A stored artifact with a damaged manifest or part; half of them with checksums made to fit the damage."""

    def __init__(self, original: Path) -> None:
        self.name, self.original = f"stored {original.name}", original

    def run(self, folder: Path, rng: random.Random) -> None:
        artifact = folder / "artifact"
        shutil.copytree(self.original, artifact)
        store_parts._checked.clear()
        manifest_path = artifact / "manifest.json"
        forged = rng.random() < 0.6
        if rng.random() < 0.4:
            data = manifest_path.read_bytes()
            manifest_path.write_bytes(_forged_json(data, rng) if forged else mutated(data, rng, data))
            what = "its manifest"
        else:
            manifest = parse_manifest(manifest_path.read_bytes(), "original")
            part = rng.choice(manifest.parts)
            data = (artifact / part.name).read_bytes()
            damaged = mutated(data, rng, (artifact / rng.choice(manifest.parts).name).read_bytes())
            (artifact / part.name).write_bytes(damaged)
            if forged:
                manifest_path.write_bytes(_with_part(manifest, part, damaged).to_json())
            what = "the same bytes" if damaged == data else "a part"
        self.read(artifact, may_differ=forged or what == "the same bytes")

    def read(self, artifact: Path, may_differ: bool) -> None:
        """Read without and with verification: whatever is accepted has the right shape."""
        opened = open_artifact(str(artifact))
        if isinstance(opened, FeatureSet):
            check(opened.read().shape == (opened.rows, opened.dim), "features of another shape")
            check(len(opened.ids()) == opened.rows, "ids of another length")
            opened.table()
            if opened.has_labels:
                check(len(opened.labels()) == opened.rows, "labels of another length")
        elif isinstance(opened, NeighborGraph):
            rows, scores = opened.read()
            check(rows.shape == scores.shape == (opened.rows, opened.k), "a graph of another shape")
        elif self.original.name in MODELS:
            MODELS[self.original.name](str(artifact))
        verify_artifact(str(artifact))
        if not may_differ:
            original = open_artifact(str(self.original)).manifest
            check(opened.manifest == original, "a damaged artifact was verified")
        if isinstance(opened, FeatureSet):
            lengths = np.linalg.norm(opened.read().astype(np.float64), axis=1)
            check(bool((np.abs(lengths - 1) < 5e-3).all()), "verified vectors are not normalised")


class Photos:
    """A set of photographs, one of its files damaged."""

    name = "data set photos"

    def run(self, folder: Path, rng: random.Random) -> None:
        files = photo_files()
        victim = rng.choice(list(files))
        for part, data in files.items():
            other = files[rng.choice(list(files))]
            (folder / f"cub200_{part}.npy").write_bytes(mutated(data, rng, other) if part == victim else data)
        found = load_photos("cub200", rng.choice(("train", "val", "test")), folder)
        for vectors, labels, ids in (
            (found.xb, found.labels, found.ids),
            (found.xq, found.query_labels, found.query_ids),
        ):
            check(vectors.ndim == 2 and len(vectors) == len(labels) == len(ids), "arrays of different lengths")
            check(vectors.dtype == np.float32 and labels.dtype == np.int32, "arrays of another type")
            check(bool(np.isfinite(vectors).all()), "vectors are not finite")


class Landmarks:
    """The published database of SfM-120k."""

    name = "data set SfM-120k"

    def run(self, folder: Path, rng: random.Random) -> None:
        (folder / "db.pkl").write_bytes(mutated(rng.choice(sfm_seeds()), rng, rng.choice(sfm_seeds())))
        half = load_sfm120k(folder / "db.pkl", rng.choice(("train", "val")))
        check(len(half.ids) == len(half.labels), "lists of different lengths")
        rows = np.concatenate([half.query_rows, half.positive_rows])
        check(bool(((rows >= 0) & (rows < len(half.ids))).all()), "a row outside of the images")
        half.positives_of_rows()


class RunFile:
    """A benchmark's TOML: damaged text, or sound text with other values."""

    name = "run .toml"

    def __init__(self, things: Path) -> None:
        self.things = things

    def run(self, folder: Path, rng: random.Random) -> None:
        if rng.random() < 0.5:
            path = folder / "run.toml"
            path.write_bytes(mutated(RUN.replace('"network"', f'"{self.things}/network"').encode(), rng, RUN.encode()))
            run = load_run(path)
        else:
            content = tomllib.loads(RUN)
            for _ in range(rng.choice((1, 1, 2))):
                content = mutated_json(content, rng)
            if not isinstance(content, dict):
                return
            run = parse_run(content, self.things, "run.toml")
        check(bool(run.datasets_of("test")) and bool(run.entries), "a run that measures nothing")
        check(0 < run.bootstrap <= 10**6, "any number of resamples")


class Picture:
    """An image file."""

    name = "image"

    def __init__(self) -> None:
        self.seeds = image_seeds()

    def run(self, folder: Path, rng: random.Random) -> None:
        data = mutated(rng.choice(self.seeds), rng, rng.choice(self.seeds))
        box = (1.0, 1.0, 6.5, 5.0) if rng.random() < 0.3 else None
        framing = Framing(size=8) if rng.random() < 0.5 else Framing(center_crop=4)
        try:
            pixels = decode(data, framing, box)
        except BadImage as error:
            raise LattqeError(str(error)) from error
        check(pixels.ndim == 3 and pixels.shape[2] == 3 and pixels.dtype == np.uint8, "no RGB picture")
        check(max(pixels.shape[:2]) <= 8, "a larger picture than asked for")


class NetworkFile:
    """A published network file, `.pth`."""

    name = "network .pth"

    def __init__(self) -> None:
        self.seeds = network_file_seeds()

    def run(self, folder: Path, rng: random.Random) -> None:
        seed, other = rng.choice(self.seeds), rng.choice(self.seeds)
        read_checkpoint(_rezipped(seed, rng, other) if rng.random() < 0.7 else mutated(seed, rng, other), "net.pth")


class TrainingWork:
    """What a stopped training has left, read as the same command does to go on."""

    name = "training checkpoint"

    def __init__(self, original: Path) -> None:
        self.original = original

    def run(self, folder: Path, rng: random.Random) -> None:
        shutil.copytree(self.original, folder / "training")
        place = open_place(str(folder / "training"))
        victim = rng.choice([STATE, STATE, *place.list()])
        path = folder / "training" / victim
        if victim == STATE and rng.random() < 0.6:
            path.write_bytes(_resealed(path.read_bytes(), rng))
        else:
            path.write_bytes(mutated(path.read_bytes(), rng, path.read_bytes()))
        checkpoints = Checkpoints(place)
        state = checkpoints.load()
        for role in ("last", "best"):
            tensors = checkpoints.tensors(state, role)
            check(all(torch.is_tensor(tensor) for tensor in tensors.values()), "something else than tensors")
        checkpoints.save(state, last=tensors)
        tensorboard_events(state.history)
        if rng.random() < 0.02:  # a figure takes a tenth of a second
            ElementTree.fromstring(learning_curve(state.history))


class BenchmarkCell:
    """A cell of a benchmark: what is damaged is measured again."""

    name = "benchmark cell"

    def __init__(self) -> None:
        self.seed = cell_seed()

    def run(self, folder: Path, rng: random.Random) -> None:
        data = _resealed(self.seed, rng, "checksum") if rng.random() < 0.6 else mutated(self.seed, rng, self.seed)
        try:
            measured = Measured.from_bytes(data, "key")
        except (ValueError, KeyError, TypeError, RecursionError) as error:  # what `Bench.is_missing` expects
            raise LattqeError(str(error) or "no cell") from error
        for one in measured.scores:
            check(0 <= one.mean_ap <= 1, f"a mean average precision of {one.mean_ap}")


def _resealed(data: bytes, rng: random.Random, key: str = "seal") -> bytes:
    """Change a JSON file and make its checksum fit."""
    body = json.loads(data)
    body.pop(key, None)
    body = mutated_json(body, rng)
    if not isinstance(body, dict):
        return json.dumps(body).encode()
    return canonical_json({**body, key: store_parts.checksum(canonical_json(body))})


def _with_part(manifest: Manifest, part: Part, data: bytes) -> Manifest:
    parts = tuple(
        Part(part.name, part.rows, len(data), store_parts.checksum(data)) if each == part else each
        for each in manifest.parts
    )
    return Manifest(manifest.kind, manifest.rows, parts, manifest.fields, manifest.config, manifest.inputs)


def _forged_json(data: bytes, rng: random.Random) -> bytes:
    """Change a manifest and make its digest and checksum fit, as an attacker would."""
    import xxhash

    body = json.loads(data)
    del body["checksum"]
    for _ in range(rng.choice((1, 1, 2))):
        body = mutated_json(body, rng)
    if not isinstance(body, dict):
        return json.dumps(body).encode()
    try:
        content = {"kind": body["kind"], "fields": body["fields"],
                   "parts": [[part["rows"], part["bytes"], part["checksum"]] for part in body["parts"]]}  # fmt: skip
        body["digest"] = xxhash.xxh3_128_hexdigest(canonical_json(content))
    except (KeyError, TypeError, ValueError):
        pass
    body["checksum"] = xxhash.xxh3_128_hexdigest(canonical_json(body))
    return json.dumps(body).encode()


def _rezipped(data: bytes, rng: random.Random, other: bytes) -> bytes:
    """Damage one member of a zip file and write it again with the checksum of the damage."""
    source, result = zipfile.ZipFile(io.BytesIO(data)), io.BytesIO()
    names = source.namelist()
    victim = rng.choice([*names, *[name for name in names if name.endswith("data.pkl")] * len(names)])
    with zipfile.ZipFile(result, "w") as archive:
        for name in names:
            content = source.read(name)
            archive.writestr(name, mutated(content, rng, other) if name == victim else content)
    return result.getvalue()


def make_targets(folder: Path) -> list[Any]:
    """All readers, each with its sound files; `folder` keeps the sound stored artifacts."""
    return [
        *(Import(ending, seeds) for ending, seeds in importer_seeds().items()),
        *(Side(ending, seeds) for ending, seeds in side_seeds().items()),
        *(Truth(ending, seeds) for ending, seeds in truth_seeds().items()),
        *(Stored(path) for path in make_things(folder)),
        Photos(),
        Landmarks(),
        RunFile(folder),
        Picture(),
        NetworkFile(),
        TrainingWork(make_work(folder)),
        BenchmarkCell(),
    ]


def try_target(target, folder: Path, rng: random.Random) -> tuple[str, str]:
    """Run one input: ('accepted' | 'refused' | 'failed', message)."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    try:
        target.run(folder, rng)
    except LattqeError as error:
        message = str(error)
        return ("refused", message) if message.strip() else ("failed", "refused without a word")
    except BaseException as error:
        return "failed", f"{type(error).__name__}: {error}"
    return "accepted", ""
