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

from lattqe.store import FeatureWriter, Pending, neighbors_table, save_model

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


def make_things(folder: Path) -> list[Path]:
    """A feature set, a neighbor graph and a model, finished."""
    with FeatureWriter(str(folder / "features"), 4, labels=True, part_bytes=40) as writer:
        writer.append(X, IDS, np.array(LABELS, np.int32))
    neighbors = (np.arange(6)[:, None] + [[1, 2]]) % 6
    scores = np.tile(np.float32([0.9, 0.5]), (6, 1))
    pending = Pending.begin(str(folder / "graph"), "neighbors", {"k": 2}, part_rows=[3, 3])
    for part in pending.missing():
        rows = slice(3 * part, 3 * part + 3)
        pending.publish(part, neighbors_table(neighbors[rows].astype(np.int32), scores[rows]))
    pending.finish()
    save_model(str(folder / "model"), {"w": X, "step": np.int64(3)}, {"dim": 4}, {"map": 0.5})
    return [folder / "features", folder / "graph", folder / "model"]
