"""The four sets of real photographs: the numbers known for them come out to the printed decimal."""

import numpy as np
import pytest

import lattqe
from lattqe.datasets.labelled import PHOTO_SETS, load_photos, photos_folder
from lattqe.errors import LattqeError
from lattqe.evaluation import evaluate, score_ranking
from lattqe.search import FlatIndex

SIZES = {  # queries, database rows of the test split
    "cub200": (700, 3462), "cars196": (680, 4903), "grocery81": (280, 2217), "caltech101": (288, 2039),
}  # fmt: skip
# No QE, AQE 4, AQEwD 8, alphaQE 3 with k = 10 and with k = 72; mAP in percent on the test split.
KNOWN = {
    128: {
        "cub200": (31.2, 35.3, 35.5, 34.8, 30.1),
        "cars196": (12.6, 13.3, 13.5, 13.4, 12.2),
        "grocery81": (44.9, 48.6, 49.0, 48.5, 39.5),
        "caltech101": (75.3, 81.4, 81.4, 80.9, 78.6),
    },
    512: {
        "cub200": (33.0, 38.3, 38.5, 37.1, 34.1),
        "cars196": (14.6, 16.4, 16.6, 16.0, 15.3),
        "grocery81": (49.8, 55.1, 55.4, 55.0, 50.5),
        "caltech101": (78.5, 84.4, 84.7, 82.8, 82.0),
    },
}
WEIGHTS = (
    (4, lambda rank, sim: np.ones_like(sim)),
    (8, lambda rank, sim: (8 - rank) / 8 + 0 * sim),
    (10, lambda rank, sim: np.maximum(sim, 0) ** 3),
    (72, lambda rank, sim: np.maximum(sim, 0) ** 3),
)


def full_ranking(xq, xb):
    return np.argsort(-(xq.astype(np.float64) @ xb.T.astype(np.float64)), axis=1)


def expanded(xq, xb, ranking, k, weight):
    neighbors = xb[ranking[:, :k]]
    similarity = (neighbors @ xq[:, :, None])[:, :, 0]
    x = xq + (weight(np.arange(1, k + 1), similarity)[:, None, :] @ neighbors)[:, 0]
    return x / np.linalg.norm(x, axis=1, keepdims=True)


@pytest.mark.slow
@pytest.mark.parametrize("columns", [128, 512])
@pytest.mark.parametrize("name", PHOTO_SETS)
def test_known_numbers_come_out_exactly(photos_folder, name, columns):
    photos = load_photos(name, "test", photos_folder, columns=columns)
    assert (len(photos.xq), len(photos.xb)) == SIZES[name]
    ranking = full_ranking(photos.xq, photos.xb)
    measured = [score_ranking(ranking, photos.truth)["label"].mean_ap]
    for k, weight in WEIGHTS:
        again = full_ranking(expanded(photos.xq, photos.xb, ranking, k, weight), photos.xb)
        measured.append(score_ranking(again, photos.truth)["label"].mean_ap)
    assert tuple(round(100 * value, 1) for value in measured) == KNOWN[columns][name]


def test_known_numbers_come_out_of_the_library_by_counting(photos_folder):
    photos = load_photos("caltech101", "test", photos_folder, columns=128)
    index = FlatIndex(photos.xb)
    measured = [evaluate(index, photos.xq, photos.truth)["label"].mean_ap]
    for method, k in (("aqe", 4), ("aqewd", 8), ("alphaqe", 10), ("alphaqe", 72)):
        params = {"alpha": 3} if method == "alphaqe" else {}
        xq = lattqe.expand(photos.xq, photos.xb, method=method, k=k, **params)
        measured.append(evaluate(index, xq, photos.truth)["label"].mean_ap)
    assert tuple(round(100 * value, 1) for value in measured) == KNOWN[128]["caltech101"]


@pytest.fixture
def small(tmp_path):
    rng = np.random.default_rng(0)
    np.save(tmp_path / "cub200_vectors.npy", rng.standard_normal((6, 8)).astype(np.float16))
    np.save(tmp_path / "cub200_labels.npy", np.array([0, 1, 2, 2, 3, 3], np.int32))
    np.save(tmp_path / "cub200_split.npy", np.array([0, 0, 2, 2, 1, 1], np.int8))
    np.save(tmp_path / "cub200_isquery.npy", np.array([0, 0, 1, 0, 0, 1], bool))
    return tmp_path


def test_splits_of_a_small_set(small, monkeypatch):
    train = load_photos("cub200", "train", small)
    assert train.ids == ["cub200_00000", "cub200_00001"]
    assert train.xq.shape == (0, 8)
    monkeypatch.setenv("LATTQE_DATA", str(small.parent))
    small.rename(small.parent / "photos")
    test = load_photos("cub200", "test", columns=3)
    assert (test.ids, test.query_ids) == (["cub200_00003"], ["cub200_00002"])
    np.testing.assert_allclose(np.linalg.norm(test.xb, axis=1), 1, atol=1e-6)
    assert test.truth.counts.tolist() == [1]


def test_wrong_use_is_refused(small, monkeypatch):
    with pytest.raises(LattqeError, match=r"unknown set of photos 'dogs'"):
        load_photos("dogs", "test", small)
    with pytest.raises(LattqeError, match=r"unknown split 'tset'"):
        load_photos("cub200", "tset", small)
    with pytest.raises(LattqeError, match=r"columns must be 1..8, got 9"):
        load_photos("cub200", "test", small, columns=9)
    with pytest.raises(LattqeError, match=r"cannot read .*cars196_vectors.npy"):
        load_photos("cars196", "test", small)
    np.save(small / "cub200_labels.npy", np.zeros(5, np.int32))
    with pytest.raises(LattqeError, match=r"do not have the same number of rows"):
        load_photos("cub200", "test", small)
    monkeypatch.delenv("LATTQE_DATA", raising=False)
    with pytest.raises(LattqeError, match=r"set LATTQE_DATA"):
        photos_folder()
    with pytest.raises(LattqeError, match=r"it is not a folder"):
        photos_folder(small / "nothing")


@pytest.mark.parametrize(
    ("part", "array", "words"),
    [
        ("vectors", np.zeros(3), "this is not a file of photos"),
        ("vectors", np.ones((12, 8), np.int8), "this is not a file of photos"),
        ("labels", np.full(12, 5000), "must be 0..999"),
        ("isquery", np.zeros(12), "this is not a file of photos"),
        ("vectors", np.full((12, 8), np.nan), "has length nan"),
        ("vectors", np.zeros((12, 8)), "has length 0"),
    ],
)
def test_files_of_another_kind_are_refused(small, part, array, words):
    rows = len(np.load(small / "cub200_labels.npy"))
    np.save(small / f"cub200_{part}.npy", np.resize(array, (rows, *array.shape[1:])))
    with pytest.raises(LattqeError, match=words):
        load_photos("cub200", "train", small)


def test_damaged_headers_are_one_line(small):
    """What the fuzzer found: numpy ends some of them with an error of its tokenizer, or of C."""
    sound = (small / "cub200_labels.npy").read_bytes()
    for damaged in (
        sound.replace(b"}", b"\n"),
        sound.replace(b"(", b"(9" + b"9" * 20 + b",")[: len(sound)],
        sound[:9],
        b"",
    ):
        (small / "cub200_labels.npy").write_bytes(damaged)
        with pytest.raises(LattqeError, match="cub200_labels"):
            load_photos("cub200", "train", small)
