"""Small whole files of every format that is read: what the fuzzer damages."""

import io
import json
import pickle
from pathlib import Path

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import safetensors.torch
import scipy.io
import torch
from PIL import Image

from lattqe.adaptation import learn
from lattqe.benchmark.cells import Cell, Measured
from lattqe.evaluation import LabelTruth, score_ranking
from lattqe.model import LAttQE
from lattqe.model.network import LAttQEConfig
from lattqe.store import FeatureWriter, Pending, neighbors_table, open_place, ranks_table, save_model
from lattqe.training.checkpoint import Checkpoints, State

X = np.random.default_rng(5).standard_normal((6, 4)).astype(np.float32)
IDS = [f"bild-{row}" for row in range(len(X))]
LABELS = [0, 1, 2, 0, 1, 2]


def _bytes(write, *arguments, **options) -> bytes:
    buffer = io.BytesIO()
    write(buffer, *arguments, **options)
    return buffer.getvalue()


def _hdf5(userblock: int = 0, **arrays) -> bytes:
    buffer = io.BytesIO()
    with h5py.File(buffer, "w", userblock_size=userblock) as file:
        for name, array in arrays.items():
            packed = {"chunks": True, "compression": "gzip"} if name == "packed" else {}
            file.create_dataset(name, data=array, **packed)
    data = bytearray(buffer.getvalue())
    if userblock:
        data[:128] = b"MATLAB 7.3 MAT-file".ljust(124) + b"\x00\x02IM"
    return bytes(data)


def _table(fixed: bool) -> pa.Table:
    kind = pa.list_(pa.float32(), 4) if fixed else pa.list_(pa.float64())
    labels = pa.array(LABELS, pa.int32()) if fixed else pa.array(["a", "b", "c"] * 2)
    return pa.table({"id": IDS, "vector": pa.array(X.tolist(), kind), "label": labels})


def _ipc(table: pa.Table, stream: bool = False, **options) -> bytes:
    sink = pa.BufferOutputStream()
    opener = pa.ipc.new_stream if stream else pa.ipc.new_file
    with opener(sink, table.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(table, max_chunksize=4)
    return sink.getvalue().to_pybytes()


def _fvecs() -> bytes:
    return np.hstack([np.full((len(X), 1), 4, np.int32), X.view(np.int32)]).tobytes()


def importer_seeds() -> dict[str, list[bytes]]:
    """Whole files by ending."""
    tensor = torch.from_numpy(X)
    lists = {"vecs": X.T, "ids": IDS, "labels": LABELS}
    return {
        ".npy": [_bytes(np.save, array) for array in (X, np.asfortranarray(X, np.float16), X.astype(">f8"))],
        ".mat": [
            _bytes(scipy.io.savemat, {"X": X.T, "labels": np.array(LABELS), "s": {"a": ["b", 1]}}),
            _bytes(scipy.io.savemat, {"X": X.T.astype(np.float64)}, do_compression=True),
            _hdf5(512, X=X, Q=X[:2]),
        ],
        ".pkl": [*(pickle.dumps(lists, protocol) for protocol in (0, 2, 4, 5)), pickle.dumps(dict(zip(IDS, X)))],
        ".fvecs": [_fvecs()],
        ".h5": [_hdf5(vectors=X), _hdf5(packed=X, labels=np.array(LABELS)), _hdf5(vectors=X, ids=IDS)],
        ".parquet": [
            _bytes(lambda sink: pq.write_table(_table(True), sink, compression="none")),
            _bytes(lambda sink: pq.write_table(_table(False), sink, row_group_size=3)),
        ],
        ".arrow": [_ipc(_table(True)), _ipc(_table(False), stream=True), _ipc(_table(True), compression="zstd")],
        ".pt": [
            _bytes(lambda sink: torch.save(tensor, sink)),
            _bytes(lambda sink: torch.save({"x": tensor.bfloat16(), "ids": IDS, "labels": torch.tensor(LABELS)}, sink)),
        ],
        ".safetensors": [
            safetensors.torch.save({"x": tensor, "labels": torch.tensor(LABELS)}),
            safetensors.torch.save({"x": tensor.bfloat16()}),
        ],
    }  # fmt: skip


def side_seeds() -> dict[str, list[bytes]]:
    """Files of ids, labels and flags by ending."""
    return {
        ".txt": ["\n".join(IDS).encode(), "\n".join(map(str, LABELS)).encode()],
        ".csv": [("id,label\n" + "".join(f'"{id}",{label}\n' for id, label in zip(IDS, LABELS))).encode()],
        ".npy": [_bytes(np.save, np.array(IDS)), _bytes(np.save, np.array(LABELS)), _bytes(np.save, X[:, 0] > 0)],
    }


def truth_seeds() -> dict[str, list[bytes]]:
    """Ground truths in the layout of the published ones."""
    lists = {"easy": [0, 2], "hard": [3], "junk": [1], "bbx": [1.0, 2.0, 30.5, 40.0]}
    truth = {"imlist": IDS, "qimlist": ["q0", "q1"], "gnd": [lists, {**lists, "easy": []}]}
    arrays = {**truth, "gnd": [{**lists, "easy": np.array([0, 2])}, lists]}
    return {
        ".pkl": [pickle.dumps(truth, 2), pickle.dumps(truth, 4), pickle.dumps(arrays, 2)],
        ".json": [json.dumps(truth).encode()],
    }


def sfm_seeds() -> list[bytes]:
    """The published database of landmarks, in small."""
    half = {"cids": IDS, "cluster": LABELS, "qidxs": [0, 1], "pidxs": [3, 4]}
    arrays = {name: value if name == "cids" else np.array(value) for name, value in half.items()}
    return [pickle.dumps({"train": each, "val": half}, protocol) for each in (half, arrays) for protocol in (2, 4)]


def photo_files() -> dict[str, bytes]:
    """One set of photographs: vectors, labels, splits and which are queries."""
    arrays = {"vectors": X, "labels": np.array(LABELS), "split": np.array([0, 0, 1, 2, 2, 2]), "isquery": X[:, 0] > 0}
    return {name: _bytes(np.save, array) for name, array in arrays.items()}


RUN = """title = "Nacht"
published = false
bootstrap = 50
nqe_sweep = [1, 2]
[[dataset]]
name = "a"
database = "features"
queries = "features"
truth = "labels"
[[dataset]]
name = "b"
database = "features"
queries = "features"
role = "validation"
[[distractors]]
name = "far"
features = "features"
of = "a"
[[method]]
method = "aqe"
nqe = 2
ndba = 3
[[method]]
method = "alphaqe"
label = "with \\u00fc"
choose = "validation"
nqe = [1, 2, 4]
alpha = [1.0, 3]
[[method]]
method = "diffusion"
choose = "test"
k = [2, 4]
[[method]]
method = "lattqe"
model = "network"
nqe = 2
[[ablation]]
label = "no position"
model = "network"
nqe = 4
"""


def image_seeds() -> list[bytes]:
    """A small picture in every format that is decoded, and some modes."""
    pixels = np.random.default_rng(0).integers(0, 256, (7, 9, 3)).astype(np.uint8)
    picture = Image.fromarray(pixels)
    exif = Image.Exif()
    exif[0x0112] = 6
    return [
        *(
            _bytes(lambda sink, name=name, options=options: picture.save(sink, name, **options))
            for name, options in (
                ("PNG", {"exif": exif}),
                ("JPEG", {"exif": exif}),
                ("JPEG", {"progressive": True}),
                ("WEBP", {"lossless": True}),
                ("WEBP", {}),
                ("GIF", {}),
                ("BMP", {}),
                ("TIFF", {}),
                ("TIFF", {"compression": "tiff_lzw"}),
                ("PPM", {}),
                ("JPEG2000", {}),
                ("AVIF", {}),
            )
        ),
        *(
            _bytes(lambda sink, mode=mode: picture.convert(mode).save(sink, "PNG"))
            for mode in ("1", "L", "LA", "P", "RGBA", "I;16")
        ),
        _bytes(lambda sink: picture.save(sink, "GIF", save_all=True, append_images=[picture.rotate(90)])),
    ]  # fmt: skip


def network_file_seeds() -> list[bytes]:
    """Network files in the published layouts, cut short: what they lack is told, whatever else is in them."""
    state = {"features.0.weight": torch.ones(2, 3, 1, 1), "pool.p": torch.full((1,), 3.0)}
    meta = {
        "architecture": "resnet50",
        "pooling": "gem",
        "whitening": True,
        "mean": [0.5, 0.5, 0.5],
        "std": [0.2, 0.2, 0.2],
        "Lw": {"a": {"ss": {"m": X[:1].T.astype(np.float64), "P": X.astype(np.float64)}}},
    }
    saved = ({"meta": meta, "state_dict": state}, {"conv1.weight": torch.ones(2, 3, 1, 1), "fc.bias": torch.ones(2)})
    return [_bytes(lambda sink, each=each: torch.save(each, sink)) for each in saved]


def make_work(folder: Path) -> Path:
    """A training that has stopped: its state and the tensors of two roles."""
    history = [
        {"step": 2, "stage": "network", "time": 1e9, "loss": 0.5, "temperature": 1.0, "seconds": 1.0},
        {
            "step": 4,
            "stage": "network",
            "time": 1e9,
            "loss": 0.4,
            "seconds": 2.0,
            "map": {"4": {"a": 51.0, "mean": 51.0}},
        },
    ]
    state = State("network", 4, 2.0, history, {"step": 4, "map": 51.0})
    tensors = {"network.w": torch.from_numpy(X)}
    Checkpoints(open_place(str(folder / "training"))).save(state, last=tensors, best=tensors)
    return folder / "training"


def cell_seed() -> bytes:
    """One cell of a benchmark."""
    scores = score_ranking(
        np.array([[0, 3, 1], [4, 0, 5]]), LabelTruth(np.array(LABELS), query_labels=np.array([0, 1]))
    )
    return Measured(tuple(scores.values()), None, {"search": 0.1}, 10).to_bytes(Cell("a", None, None, None), "key")


def make_things(folder: Path) -> list[Path]:
    """A feature set, a neighbor graph, ranks and models, finished."""
    with FeatureWriter(str(folder / "features"), 4, labels=True, part_bytes=40) as writer:
        writer.append(X, IDS, np.array(LABELS, np.int32))
    neighbors = (np.arange(6)[:, None] + [[1, 2]]) % 6
    scores = np.tile(np.float32([0.9, 0.5]), (6, 1))
    pending = Pending.begin(str(folder / "graph"), "neighbors", {"k": 2}, part_rows=[3, 3])
    for part in pending.missing():
        rows = slice(3 * part, 3 * part + 3)
        pending.publish(part, neighbors_table(neighbors[rows].astype(np.int32), scores[rows]))
    pending.finish()
    ranks = Pending.begin(str(folder / "ranks"), "ranks", {"k": 2}, part_rows=[6])
    ranks.publish(0, ranks_table(IDS, neighbors.astype(np.int32), scores))
    ranks.finish()
    save_model(str(folder / "model"), {"w": X, "step": np.int64(3)}, {"dim": 4}, {"map": 0.5})
    torch.manual_seed(0)
    LAttQE(
        LAttQEConfig(
            dim=4,
            relational=True,
            relation_bias=True,
            gated=True,
            visual=False,
            width=4,
            heads=1,
            layers=1,
            max_k=4,
            background=4,
        )
    ).save(str(folder / "network"), {"nqe": 2, "ndba": 2, "nqe_with_dba": 2})
    learn(np.repeat(X, 2, axis=0), np.repeat(X[::-1], 2, axis=0)[:, None], 12).save(str(folder / "adaptation"))
    return [folder / name for name in ("features", "graph", "ranks", "model", "network", "adaptation")]
