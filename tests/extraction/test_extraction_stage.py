"""Blocks to a feature set: good rows in order, the others listed, whatever was killed in between."""

import csv
import io

import numpy as np
import pytest

from lattqe.errors import AlreadyExistsError, LattqeError
from lattqe.extraction import stage
from lattqe.extraction.image import ImageEntry, ImageList
from lattqe.extraction.stage import (
    DescribedBlock,
    DescribedImages,
    Destination,
    block_rows,
    block_table,
    find_skipped,
    merge,
)
from lattqe.store import FeatureSet, Pending, open_place

DIM = 8


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(stage, "MIN_BLOCK", 10)


def images(count):
    return ImageList.of("/", [ImageEntry(f"image {number}", f"{number}.jpg") for number in range(count)])


def vector(number):
    values = np.random.default_rng(number).normal(size=DIM)
    return (values / np.linalg.norm(values)).astype(np.float32)


def describe(listed, start, stop, bad):
    entries = list(listed.entries(start, stop))
    numbers = range(start, stop)
    reasons = [f'reason, "{number}"' if number in bad else "" for number in numbers]
    vectors = np.stack([vector(number) * (number not in bad) for number in numbers])
    return entries, DescribedBlock(vectors, reasons)


def destination(uri, **config):
    inputs = {"images": {"uri": "somewhere", "digest": "abc", "kind": "images"}}
    return Destination(str(uri), DIM, "float32", {"size": 64, **config}, inputs)


def publish_blocks(target, listed, bad, only=None):
    pending = target.begin(listed)
    starts = np.cumsum([0, *pending.part_rows])
    for block in pending.missing() if only is None else only:
        entries, described = describe(listed, int(starts[block]), int(starts[block + 1]), bad)
        pending.publish(block, block_table(entries, described, target.dtype))
    return pending


def extract(target, listed, bad, **columns):
    publish_blocks(target, listed, bad).finish()
    described = DescribedImages.open(target.stage_uri)
    return merge(target, described, find_skipped(described), **columns)


BAD = {0, 9, 10, 33, *range(20, 30), 46}


def check(uri, count, bad):
    features = FeatureSet.open(str(uri))
    good = [number for number in range(count) if number not in bad]
    assert features.ids() == [f"image {number}" for number in good]
    np.testing.assert_allclose(features.read(), np.stack([vector(number) for number in good]), atol=1e-7)
    features.verify()
    rows = list(csv.DictReader(io.StringIO(open_place(str(uri)).read("skipped.csv").decode())))
    assert [(int(row["number"]), row["id"], row["reason"]) for row in rows] == [
        (number, f"image {number}", f'reason, "{number}"') for number in sorted(bad)
    ]
    assert not [name for name in open_place(str(uri)).list() if name.startswith("_work")]


@pytest.mark.parametrize("bad", [BAD, set(), set(range(1, 47))])
def test_good_rows_in_order_and_bad_ones_listed(tmp_path, bad):
    manifest = extract(destination(tmp_path / "out"), images(47), bad)
    assert manifest.rows == 47 - len(bad)
    assert manifest.config["skipped"] == len(bad)
    check(tmp_path / "out", 47, bad)


def test_on_s3(s3_uri):
    extract(destination(s3_uri), images(47), BAD)
    check(s3_uri, 47, BAD)


def test_many_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(stage, "part_row_counts", lambda rows, _: [5] * (rows // 5) + ([rows % 5] if rows % 5 else []))
    manifest = extract(destination(tmp_path / "out"), images(47), BAD)
    assert len(manifest.parts) == 7
    check(tmp_path / "out", 47, BAD)


def test_labels_and_crops_stay_with_their_images(tmp_path):
    crops = np.arange(47 * 4, dtype=np.float32).reshape(47, 4)
    extract(destination(tmp_path / "out"), images(47), BAD, labels=np.arange(47), crops=crops)
    features = FeatureSet.open(str(tmp_path / "out"))
    good = [number for number in range(47) if number not in BAD]
    assert features.labels().tolist() == good
    assert features.table().column("crop").to_pylist() == crops[good].tolist()
    check(tmp_path / "out", 47, BAD)


@pytest.mark.parametrize("killed_after", ["some blocks", "all blocks", "stage finished", "some parts", "all parts"])
def test_killed_anywhere_the_bytes_are_the_same(tmp_path, monkeypatch, killed_after):
    monkeypatch.setattr(stage, "part_row_counts", lambda rows, _: [8] * (rows // 8) + ([rows % 8] if rows % 8 else []))
    extract(destination(tmp_path / "whole"), images(47), BAD)
    target, listed = destination(tmp_path / "killed"), images(47)
    pending = publish_blocks(target, listed, BAD, only=[0, 3] if killed_after == "some blocks" else None)
    if killed_after in ("stage finished", "some parts", "all parts"):
        pending.finish()
    if killed_after in ("some parts", "all parts"):
        die_after = 2 if killed_after == "some parts" else 4
        real_publish = stage.Pending.publish

        def dying(self, number, table):
            if number >= die_after:
                raise KeyboardInterrupt
            real_publish(self, number, table)

        described = DescribedImages.open(target.stage_uri)
        with monkeypatch.context() as patch:
            patch.setattr(stage.Pending, "publish", dying)
            patch.setattr(stage.Pending, "finish", lambda self: (_ for _ in ()).throw(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                merge(target, described, find_skipped(described))
    assert target.find_finished() is None
    extract(target, listed, BAD)
    for name in open_place(str(tmp_path / "whole")).list():
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name


def test_finished_is_recognised_and_another_configuration_refused(tmp_path):
    manifest = extract(destination(tmp_path / "out"), images(20), {3})
    open_place(str(tmp_path / "out")).write("_work/blocks/part-00001.arrow", b"left by a killed run")
    assert destination(tmp_path / "out").find_finished() == manifest
    assert open_place(str(tmp_path / "out")).list() == ["manifest.json", "part-00000.arrow", "skipped.csv"]
    with pytest.raises(AlreadyExistsError, match=r"config\.size: 64 there, 32 here"):
        destination(tmp_path / "out", size=32).find_finished()


def test_unfinished_of_another_configuration_is_refused(tmp_path):
    publish_blocks(destination(tmp_path / "out"), images(20), set(), only=[0])
    with pytest.raises(AlreadyExistsError, match=r"config\.size: 64 there, 32 here"):
        destination(tmp_path / "out", size=32).begin(images(20))


def test_what_would_stand_in_the_way_later_is_refused_at_once(tmp_path):
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "thesis.tex").write_text("do not touch")
    with pytest.raises(AlreadyExistsError, match=r"holds other files \(thesis\.tex\)"):
        destination(tmp_path / "taken").begin(images(20))
    Pending.begin(str(tmp_path / "claimed"), "features", {"dim": DIM, "dtype": "float32"}, [5], {"made": "otherwise"})
    with pytest.raises(AlreadyExistsError, match="an unfinished artifact that differs"):
        destination(tmp_path / "claimed").begin(images(20))
    assert (tmp_path / "taken" / "thesis.tex").read_text() == "do not touch"


def test_not_one_good_image_is_an_error(tmp_path):
    with pytest.raises(LattqeError, match="not one of 12 images gave a vector, the first because: reason"):
        extract(destination(tmp_path / "out"), images(12), set(range(12)))


def test_blocks_are_cut_by_number_alone():
    assert block_rows(25) == [10, 10, 5]
    assert block_rows(1) == [1]
    assert sum(block_rows(1_000_001)) == 1_000_001
    assert len(block_rows(1_000_001)) <= 4096
    assert len(set(block_rows(1_000_001)[:-1])) == 1
