"""`lattqe extract`: five hundred files with twenty kinds of bad ones, kills, S3, crops, and what it refuses."""

import csv
import io
import json
import os
import pickle
import struct
import subprocess
import sys
import zipfile
import zlib
from contextlib import redirect_stderr, redirect_stdout

import numpy as np
import pytest
import torch
from killing import killed_midway
from PIL import Image

from jobs import cli
from jobs.extract import _publish, bad_limit
from lattqe.errors import LattqeError
from lattqe.extraction.encoder import EncoderSpec, open_encoder
from lattqe.extraction.image import Framing, ImageEntry, ImageList, decode
from lattqe.extraction.resnet import RetrievalNet
from lattqe.extraction.stage import DescribedBlock, Destination, block_table
from lattqe.store import FeatureSet, open_place

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("local_ray")]

TINY = ("--encoder", "tiny_encoder:make", "--size", "32")
CPU = torch.device("cpu")


def lattqe_extract(patch, *arguments):
    """Call `lattqe extract` in this process: its exit code."""
    patch.setattr(sys, "argv", ["lattqe", "extract", *map(str, arguments)])
    try:
        cli.main()
    except SystemExit as end:
        return end.code or 0
    return 0


@pytest.fixture
def run(monkeypatch, capsys):
    """Call `lattqe extract` in this process: (exit code, stdout, stderr)."""

    def call(*arguments):
        code = lattqe_extract(monkeypatch, *arguments)
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return call


def noise(seed, width=24, height=18):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def encoded(image, format, **options):
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def png_of(width, height):
    def chunk(name, data):
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    chunks = chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(b"\0" * 100)), chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def bad_files():
    """Twenty kinds of file that give no picture: name → (content, part of the reason)."""
    rng = np.random.default_rng(0)
    files = {format: encoded(noise(0, 64, 64), format) for format in ("JPEG", "PNG", "WEBP", "BMP")}
    flipped = bytearray(files["PNG"])
    flipped[len(flipped) // 2] ^= 0xFF
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("image.jpg", files["JPEG"])
    floats = Image.fromarray(np.ones((4, 4), dtype=np.float32))
    integers = Image.fromarray(np.full((4, 4), 1 << 20, dtype=np.int32))
    return {
        "empty.jpg": (b"", "empty"),
        "text.jpg": (b"not a picture\n" * 20, "not an image"),
        "page.jpg": (b"<!DOCTYPE html><title>404</title>", "not an image"),
        "random.jpg": (rng.bytes(5000), "not an image"),
        "zeros.jpg": (b"\0" * 5000, "not an image"),
        "vector.svg": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "not an image"),
        "document.pdf": (b"%PDF-1.7\n%%EOF", "not an image"),
        "script.eps": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "not an image"),
        "archive.jpg": (archive.getvalue(), "not an image"),
        "pickle.jpg": (pickle.dumps({"a": 1}), "not an image"),
        "head.jpg": (files["JPEG"][:300], "cannot be decoded"),
        "half.jpg": (files["JPEG"][: len(files["JPEG"]) // 2], "cannot be decoded"),
        "half.png": (files["PNG"][: len(files["PNG"]) // 2], "cannot be decoded"),
        "flipped.png": (bytes(flipped), "cannot be decoded"),
        "half.webp": (files["WEBP"][: len(files["WEBP"]) // 2], "cannot be decoded"),
        "half.bmp": (files["BMP"][: len(files["BMP"]) // 2], "cannot be decoded"),
        "bomb.png": (png_of(60_000, 60_000), "too large"),
        "large.png": (png_of(9_500, 9_500), "too large: 9500×9500 by its header, over 89000000 pixels"),
        "float.tif": (encoded(floats, "TIFF"), "floating-point"),
        "integer.tif": (encoded(integers, "TIFF"), "beyond 16 bits"),
    }


def write_good(folder, number):
    """Good files of many kinds, at home in three folders."""
    kinds = [
        ("png", lambda i: i),
        ("jpg", lambda i: i),
        ("gif", lambda i: i),
        ("webp", lambda i: i),
        ("png", lambda i: i.convert("L")),
        ("png", lambda i: i.quantize(8)),
        ("jpg", lambda i: i.convert("CMYK")),
        ("png", lambda i: i.convert("RGBA")),
        ("tif", lambda i: i),
        ("bmp", lambda i: i),
    ]
    suffix, change = kinds[number % len(kinds)]
    name = f"{'abc'[number % 3]}/{number:03}.{suffix}"
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    change(noise(number)).save(folder / name)
    return name


@pytest.fixture(scope="module")
def five_hundred(tmp_path_factory):
    """480 good files and 20 bad ones, spread over folders: (folder, good names, bad files)."""
    folder = tmp_path_factory.mktemp("five hundred")
    good = sorted(write_good(folder, number) for number in range(480))
    bad = {}
    for number, (name, content) in enumerate(bad_files().items()):
        path = f"{'abc'[number % 3]}/{number * 24:03}-{name}"
        (folder / path).write_bytes(content[0])
        bad[path] = content
    assert len(good) + len(bad) == 500
    return folder, good, bad


def skipped_rows(uri):
    return list(csv.DictReader(io.StringIO(open_place(str(uri)).read("skipped.csv").decode())))


def expected_vector(path, framing=None, box=None, scales=(1.0, 0.5**0.5, 2**0.5)):
    """One image on its own, without threads, blocks or Ray."""
    pixels = decode(path.read_bytes(), framing or Framing(size=32), box)
    encoder = open_encoder(EncoderSpec(hook="tiny_encoder:make"), CPU)
    return encoder.describe(torch.from_numpy(pixels.copy())[None], scales).numpy()[0]


@pytest.fixture(scope="module")
def extracted(five_hundred, tmp_path_factory):
    """Extract the five hundred, allowing first 19 bad files, then 20: (where to, [(exit code, stdout, stderr)])."""
    to = tmp_path_factory.mktemp("extracted") / "out"
    said = []
    for allowed in ("19", "20"):
        out, err = io.StringIO(), io.StringIO()
        with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
            code = lattqe_extract(
                patch, five_hundred[0], "--to", to, *TINY, "--labels-from-folders", "--max-bad", allowed, "--json"
            )
        said.append((code, out.getvalue(), err.getvalue()))
    return to, said


def test_five_hundred_files_with_twenty_kinds_of_bad_ones(five_hundred, extracted):
    folder, good, bad = five_hundred
    to, said = extracted
    code, out, err = said[1]
    assert code == 0, err
    assert json.loads(out) == {"uri": str(to), "rows": 480, "dim": 16, "skipped": 20}
    features = FeatureSet.open(str(to))
    features.verify()
    assert features.ids() == good
    assert features.labels().tolist() == ["abc".index(name[0]) for name in good]
    for row in range(0, 480, 23):
        np.testing.assert_allclose(features.read(row, row + 1)[0], expected_vector(folder / good[row]), atol=5e-4)
    rows = skipped_rows(to)
    assert [row["id"] for row in rows] == sorted(bad)
    assert [int(row["number"]) for row in rows] == [sorted([*good, *bad]).index(name) for name in sorted(bad)]
    for row in rows:
        assert bad[row["id"]][1] in row["reason"], row
    manifest = features.manifest
    assert manifest.config["skipped"] == 20
    assert manifest.inputs["encoder"]["uri"] == "tiny_encoder:make"
    assert sorted(open_place(str(to)).list()) == ["manifest.json", "part-00000.arrow", "skipped.csv"]


def test_too_many_bad_ones_is_one_line_and_nothing_on_stdout(extracted):
    code, out, err = extracted[1][0]
    assert (code, out) == (2, "")
    errors = [line for line in err.splitlines() if line.startswith("error:")]
    assert len(errors) == 1
    assert "20 of 500 images are bad and --max-bad allows 19" in errors[0]
    assert "and 15 more" in errors[0]


def test_too_many_bad_ones_in_the_end_are_all_listed(tmp_path):
    """When all blocks are there the whole list is written; a higher limit then publishes what is there."""
    images = ImageList.of("/", [ImageEntry(f"{number}", f"{number}.jpg") for number in range(10)])
    destination = Destination(str(tmp_path / "out"), 16, "float32", {"crop": None}, {})
    pending = destination.begin(images)
    block = DescribedBlock(np.eye(10, 16, dtype=np.float32), ["", "bad", "worse", *[""] * 7])
    pending.publish(0, block_table(list(images.entries()), block, "float32"))
    pending.finish()
    where = f"{tmp_path / 'out'}/_work/blocks/skipped.csv"
    with pytest.raises(LattqeError, match=rf"2 of 10 .* allows 1 \(1: bad; 2: worse\), all listed in {where}"):
        _publish(destination, images, None, tolerated=1)
    assert [row["reason"] for row in skipped_rows(tmp_path / "out" / "_work" / "blocks")] == ["bad", "worse"]
    assert _publish(destination, images, None, tolerated=2).rows == 8


def test_a_twin_that_was_faster_is_no_error(tmp_path, run, monkeypatch):
    """Another run of the same command published, and cleared the blocks away under the hands of this one."""
    write_good(tmp_path / "images", 0)
    described_by_twin = DescribedBlock(np.eye(1, 16, dtype=np.float32), [""])

    def described_elsewhere(settings, destination, listed, part_rows, blocks, workers, tolerated):
        pending = destination.begin(listed)
        pending.publish(0, block_table(list(listed.entries()), described_by_twin, settings.dtype))
        pending.finish()
        _publish(destination, listed, None, tolerated)
        raise LattqeError("a block is gone")

    monkeypatch.setattr("jobs.extract._describe", described_elsewhere)
    code, out, err = run(tmp_path / "images", "--to", tmp_path / "out", *TINY, "--json")
    assert (code, json.loads(out)["rows"]) == (0, 1), err


def test_finished_is_left_alone_and_another_configuration_refused(five_hundred, extracted, run):
    folder, to = five_hundred[0], extracted[0]
    before = (to / "manifest.json").stat().st_mtime_ns
    code, out, err = run(folder, "--to", to, *TINY, "--labels-from-folders")
    assert (code, out) == (0, ""), "JSON was not asked for"
    assert "480" in err
    assert (to / "manifest.json").stat().st_mtime_ns == before
    code, _, err = run(folder, "--to", to, *TINY[:2], "--size", "16", "--labels-from-folders")
    assert code == 2
    assert "config.size: 32 there, 16 here" in err
    extra = folder / "a" / "one more.png"
    noise(0).save(extra)
    code, _, err = run(folder, "--to", to, *TINY, "--labels-from-folders")
    extra.unlink()
    assert code == 2
    assert "inputs.images.digest" in err


def test_queries_of_a_ground_truth_are_cropped(tmp_path, run):
    folder = tmp_path / "images"
    folder.mkdir()
    for number, name in enumerate(("q1", "q2", "d2")):
        noise(number, 60, 45).save(folder / f"{name}.png")
    boxes = [(3.2, 4.0, 40.9, 30.0), (10.0, 0.0, 60.0, 45.0)]
    truth = {
        "imlist": ["d2", "d1"],
        "qimlist": ["q2", "q1"],
        "gnd": [{"easy": [0], "hard": [], "junk": [1], "bbx": list(box)} for box in boxes],
    }
    (tmp_path / "gnd.pkl").write_bytes(pickle.dumps(truth))
    common = (folder, *TINY, "--gnd", tmp_path / "gnd.pkl", "--scales", "1")
    assert run(*common, "--to", tmp_path / "queries", "--queries")[0] == 0
    queries = FeatureSet.open(str(tmp_path / "queries"))
    assert queries.ids() == ["q2", "q1"]
    for row, (name, box) in enumerate(zip(queries.ids(), boxes)):
        expected = expected_vector(folder / f"{name}.png", box=box, scales=(1.0,))
        np.testing.assert_allclose(queries.read(row, row + 1)[0], expected, atol=5e-4)
    np.testing.assert_allclose(queries.table().column("crop").to_pylist(), boxes, rtol=1e-6)
    assert queries.manifest.config["crop"] == "bbx, at the scale of the full image"
    assert queries.manifest.inputs["gnd"]["kind"] == "ground truth"
    # The ground truth counts rows: not one of its database images may be missing.
    code, _, err = run(*common, "--to", tmp_path / "incomplete")
    assert code == 2
    assert "1 of 2 images are bad and --max-bad allows 0 (d1: missing file)" in err


def test_published_network_from_disk_and_from_s3(tmp_path, s3_uri, run):
    """A ResNet-50 file in the published layout; a bucket of images gives on S3 the very bytes of a list on disk."""
    torch.manual_seed(0)
    network = RetrievalNet("resnet50").eval()
    torch.nn.init.constant_(network.pool.p, 2.9)
    meta = {
        "architecture": "resnet50",
        "local_whitening": False,
        "pooling": "gem",
        "regional": False,
        "whitening": True,
        "mean": [0.485, 0.456, 0.406],
        "std": [0.229, 0.224, 0.225],
        "outputdim": 2048,
    }
    torch.save({"meta": meta, "state_dict": network.state_dict()}, tmp_path / "net.pth")
    images = tmp_path / "images"
    images.mkdir()
    bucket = open_place(f"{s3_uri}/images")
    for number in range(6):
        noise(number, 64, 48).save(images / f"{number}.png")
    (images / "broken.png").write_bytes(b"broken")
    for path in sorted(images.iterdir()):
        bucket.write(path.name, path.read_bytes())
    options = ("--checkpoint", tmp_path / "net.pth", "--size", "64", "--dtype", "float32", "--max-bad", "1")
    (tmp_path / "list.txt").write_text("\n".join(path.name for path in sorted(images.iterdir())))
    assert run(tmp_path / "list.txt", "--root", images, "--to", tmp_path / "out", *options)[0] == 0
    assert run(bucket.uri, "--to", f"{s3_uri}/features", *options)[0] == 0
    on_disk, on_s3 = FeatureSet.open(str(tmp_path / "out")), FeatureSet.open(f"{s3_uri}/features")
    assert on_disk.digest == on_s3.digest
    assert skipped_rows(f"{s3_uri}/features") == skipped_rows(tmp_path / "out")
    assert not [name for name in open_place(f"{s3_uri}/features").list() if name.startswith("_work")]
    for row in range(6):
        pixels = decode((images / f"{row}.png").read_bytes(), Framing(size=64)).astype(np.float32) / 255
        normalised = torch.from_numpy((pixels - meta["mean"]) / meta["std"]).float().permute(2, 0, 1)[None]
        total = 0
        with torch.inference_mode():
            for size in ((48, 64), (33, 45), (67, 90)):
                total = total + network(torch.nn.functional.interpolate(normalised, size, mode="bilinear"))[0]
        np.testing.assert_allclose(on_disk.read(row, row + 1)[0], (total / total.norm()).numpy(), atol=2e-6)


@pytest.mark.slow
@pytest.mark.kill
def test_killed_driver_is_continued_to_the_same_bytes(tmp_path, monkeypatch, run):
    """SIGKILL in the middle; the second run keeps the blocks that were stored and ends with the very same files."""
    images = tmp_path / "images"
    for number in range(384):
        write_good(images, number)
    (images / "a" / "bad.png").write_bytes(b"bad")
    log = tmp_path / "log"
    monkeypatch.setenv("LATTQE_TEST_LOG", str(log))
    options = ["--encoder", "tiny_encoder:make_logging", "--size", "32", "--scales", "1"]
    environment = {**os.environ, "PYTHONPATH": os.path.dirname(os.path.dirname(__file__))}
    environment.pop("RAY_ADDRESS", None)

    def start(to):
        return subprocess.Popen(
            [sys.executable, "-m", "jobs.extract", str(images), "--to", str(to), *options],
            env=environment,
            text=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )

    def stored(to):
        return len(list((to / "_work" / "blocks" / "_work").glob("part-*.json")))

    killed = killed_midway(start, tmp_path, stored)
    kept = stored(killed)
    assert 1 <= kept <= 7
    log.unlink()
    finished = start(killed)
    _, shown = finished.communicate()
    assert finished.returncode == 0, shown
    assert "Traceback" not in shown
    # What was stored is not described again; the driver's probe is one image more.
    assert len(log.read_text().splitlines()) <= 384 - (kept - 1) * 64 + 1
    assert run(images, "--to", tmp_path / "whole", *options)[0] == 0
    assert FeatureSet.open(str(tmp_path / "whole")).rows == 384
    for name in open_place(str(tmp_path / "whole")).list():
        assert (killed / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["IMAGES", "--to", "OUT"], "no network given"),
        (["IMAGES", "--to", "OUT", "--encoder", "nothing:at_all"], "ModuleNotFoundError"),
        (["IMAGES", "--to", "OUT", "--checkpoint", "IMAGES/a/000.png"], "refused, it is not a file of plain tensors"),
        (["NOWHERE", "--to", "OUT", *TINY], "there are no images at"),
        (["IMAGES", "--to", "IMAGES/features", *TINY], "is inside"),
        (["IMAGES", "--to", "OUT", *TINY, "--queries"], "--queries needs --gnd"),
        (["IMAGES", "--to", "OUT", *TINY, "--max-bad", "many"], "--max-bad 'many'"),
        (["IMAGES", "--to", "OUT", *TINY, "--scales", "big"], "scales 'big'"),
        (["IMAGES", "--to", "OUT", *TINY, "--dtype", "int8"], "int8"),
        (["IMAGES", "--to", "OUT", *TINY, "--mean", "1,2"], "--mean '1,2' is not three numbers"),
        (["IMAGES", "--to", "OUT", *TINY, "--batch", "0"], "--batch 0"),
        (["IMAGES", "--to", "OUT", *TINY, "--workers", "0"], "--workers 0"),
        (["IMAGES", "--to", "OUT", *TINY, "--device", "tpu"], "'tpu' is not auto, cpu or cuda"),
        (["IMAGES", "--to", "OUT", *TINY, "--device", "cuda"], "the cluster has no GPU"),
        (["IMAGES", "--to", "OUT", *TINY, "--max-pixels", "0"], "max pixels must be at least 1"),
    ],
)
def test_mistakes_are_one_line(tmp_path, run, arguments, message):
    write_good(tmp_path / "IMAGES", 0)
    code, out, err = run(
        *(
            tmp_path / argument if argument.startswith(("IMAGES", "NOWHERE", "OUT")) else argument
            for argument in arguments
        )
    )
    assert (code, out) == (2, "")
    lines = [line for line in err.splitlines() if line.startswith("error:")]
    assert len(lines) == 1
    assert message in lines[0]
    assert not (tmp_path / "OUT" / "manifest.json").exists()


def test_limits_of_bad_images():
    limits = {"0": 0, "20": 20, "1": 1, "0.1": 50, "5%": 25, "1.0": 500, "100%": 500}
    assert {text: bad_limit(text, 500) for text in limits} == limits
    for wrong in ("-1", "1.5", "200%", "", "nan", "x"):
        with pytest.raises(LattqeError, match="--max-bad"):
            bad_limit(wrong, 500)
