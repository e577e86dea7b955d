"""Which images in which order: folders, list files, ground truths."""

import io
import os

import numpy as np
import pytest
from PIL import Image
from s3_proxy import FaultyProxy

from lattqe.datasets.revisited import from_gnd, load_gnd
from lattqe.errors import LattqeError
from lattqe.extraction.image import (
    Framing,
    ImageEntry,
    ImageList,
    folder_labels,
    list_ground_truth,
    list_images,
    read_picture,
)
from lattqe.store import open_place


def write(folder, *names):
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" * len(name))


def ids(images):
    return [entry.id for entry in images.entries()]


def test_folder_is_sorted_recursive_and_without_hidden_files(tmp_path):
    write(tmp_path, "b/2.jpg", "a/10.jpg", "a/9.jpg", "z.png", ".DS_Store", ".git/config", "a/.thumb.jpg", "B.jpg")
    images = list_images(str(tmp_path))
    assert ids(images) == ["B.jpg", "a/10.jpg", "a/9.jpg", "b/2.jpg", "z.png"]
    assert [entry.bytes for entry in images.entries()] == [5, 8, 7, 7, 5]
    assert ids(list_images(f"file://{tmp_path}")) == ids(images)


def test_nothing_there_says_so(tmp_path):
    for where in (tmp_path, tmp_path / "none"):
        with pytest.raises(LattqeError, match="there are no images at"):
            list_images(str(where))


def test_names_that_are_not_text_are_kept_to_be_listed(tmp_path):
    write(tmp_path, "good.jpg")
    with open(os.fsencode(tmp_path) + b"/bad\xff.jpg", "wb") as file:
        file.write(b"x")
    assert ids(list_images(str(tmp_path))) == ["bad\\udcff.jpg", "good.jpg"]


def test_list_file_keeps_its_order_and_its_spelling(tmp_path):
    write(tmp_path, "pictures/b.jpg", "pictures/a.jpg", "elsewhere/c.jpg")
    listing = tmp_path / "pictures" / "some.txt"
    lines = ["b.jpg", "", "a.jpg", "../elsewhere/c.jpg", str(tmp_path / "elsewhere" / "c.jpg"), "gone.jpg"]
    listing.write_text("\r\n".join(lines))
    images = list_images(str(listing))
    entries = list(images.entries())
    assert [entry.id for entry in entries] == [line for line in lines if line]
    place = open_place(images.root)
    assert [place.read(entry.name) for entry in entries[:4]] == [b"x" * 14, b"x" * 14, b"x" * 15, b"x" * 15]
    assert [entry.bytes for entry in entries] == [14, 14, 15, 15, -1]


def test_list_file_with_a_root(tmp_path):
    write(tmp_path, "pictures/b.jpg")
    (tmp_path / "list").write_text("b.jpg\n")
    images = list_images(str(tmp_path / "list"), root=str(tmp_path / "pictures"))
    assert [(entry.id, entry.bytes) for entry in images.entries()] == [("b.jpg", 14)]
    with pytest.raises(LattqeError, match="--root goes with a list file"):
        list_images(str(tmp_path / "pictures"), root=str(tmp_path))


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"a.jpg\nb.jpg\na.jpg\n", "'a.jpg' is listed twice"), (b"\n\n", "lists no images"), (b"\xff\xfe", "not a UTF-8")],
)
def test_wrong_lists_are_refused(tmp_path, content, message):
    (tmp_path / "list.txt").write_bytes(content)
    with pytest.raises(LattqeError, match=message):
        list_images(str(tmp_path / "list.txt"))


def test_on_s3(s3_uri):
    place = open_place(s3_uri)
    for name in ("b/1.jpg", "a.jpg", ".hidden"):
        place.write(name, b"12")
    place.write("lists/some.txt", b"b/1.jpg\na.jpg\nnone.jpg\n")
    images = list_images(f"{s3_uri}/lists/some.txt", root=s3_uri)
    assert ids(images) == ["b/1.jpg", "a.jpg", "none.jpg"]
    assert images.root == s3_uri
    assert ids(list_images(s3_uri)) == ["a.jpg", "b/1.jpg", "lists/some.txt"]


def test_digest_tells_what_matters(tmp_path):
    entries = [ImageEntry("a", "a", 3), ImageEntry("b", "b", 4, (1.0, 2.0, 3.0, 4.0))]
    digest = ImageList.of("/somewhere", entries).digest()
    assert ImageList.of("/elsewhere", entries).digest() == digest
    for changed in (
        [entries[1], entries[0]],
        [ImageEntry("a", "a", 5), entries[1]],
        [entries[0]],
        [entries[0], ImageEntry("b", "b", 4, (1.0, 2.0, 3.0, 5.0))],
    ):
        assert ImageList.of("/somewhere", changed).digest() != digest


def test_list_survives_storage(tmp_path):
    entries = [ImageEntry("a", "a.jpg", 3), ImageEntry("ü", "b", -1, (1.5, 2.0, 3.0, 4.0))]
    ImageList.of("/root", entries).save(open_place(str(tmp_path)), "images.arrow")
    loaded = ImageList.load("/root", open_place(str(tmp_path)), "images.arrow")
    assert list(loaded.entries()) == entries
    assert list(loaded.entries(1, 2)) == entries[1:]
    assert len(loaded) == 2


@pytest.fixture
def truth():
    return from_gnd(
        {
            "imlist": ["x", "y", "z"],
            "qimlist": ["q2", "q1"],
            "gnd": [
                {"easy": [0], "hard": [], "junk": [], "bbx": [1, 2, 30.5, 40]},
                {"easy": [1], "hard": [], "junk": []},
            ],
        }
    )


def test_ground_truth_decides_order_ids_and_crops(tmp_path, truth):
    write(tmp_path, "x.jpg", "y.png", "q1.jpg", "q2.jpg", "other.jpg")
    database = list(list_ground_truth(str(tmp_path), truth, queries=False).entries())
    assert [(entry.id, entry.name) for entry in database] == [("x", "x.jpg"), ("y", "y.png"), ("z", "z.jpg")]
    assert database[2].bytes == -1, "a missing image is found missing when it is read"
    queries = list(list_ground_truth(str(tmp_path), truth, queries=True).entries())
    assert [(entry.id, entry.box) for entry in queries] == [("q2", (1.0, 2.0, 30.5, 40.0)), ("q1", None)]


def test_published_ground_truth(tmp_path, real_gnd):
    truth = load_gnd(real_gnd)
    write(tmp_path, f"{truth.qimlist[0]}.jpg")
    queries = list(list_ground_truth(str(tmp_path), truth, queries=True).entries())
    assert len(queries) == 70
    assert all(entry.box is not None and entry.box[2] > entry.box[0] for entry in queries)
    assert queries[0].bytes > 0


def test_labels_by_top_folder():
    images = ImageList.of("/", [ImageEntry(name, name) for name in ("cat/1", "cat/old/2", "ant/1", "dog/1")])
    assert folder_labels(images) == ([1, 1, 0, 2], ["ant", "cat", "dog"])
    with pytest.raises(LattqeError, match="1 images are not in a folder"):
        folder_labels(ImageList.of("/", [ImageEntry("cat/1", ""), ImageEntry("loose", "")]))


@pytest.mark.parametrize("stored_with_a_checksum", [True, False])
def test_an_image_that_is_damaged_on_the_way_is_read_again(s3, s3_uri, monkeypatch, stored_with_a_checksum):
    """Found by the fault campaign: such images were listed as bad, and so for ever."""
    if not stored_with_a_checksum:  # as in buckets of old
        monkeypatch.setenv("AWS_REQUEST_CHECKSUM_CALCULATION", "when_required")
    pixels = np.random.default_rng(0).integers(0, 256, (20, 28, 3)).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    open_place(s3_uri).write("a.png", file.getvalue())
    damaged = []

    def fault(method: str, path: str) -> str | None:
        if method == "GET" and path.endswith("a.png") and not damaged:
            damaged.append(path)
            return "corrupt"
        return None

    proxy = FaultyProxy(s3.endpoint, fault)
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
    try:
        found = read_picture(open_place(s3_uri), ImageEntry("a.png", "a.png", len(file.getvalue())), Framing())
    finally:
        proxy.close()
    assert damaged
    np.testing.assert_array_equal(found, pixels)
