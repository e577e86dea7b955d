"""A block of images through threads and network: order, reasons, batches, and what is no image's fault."""

import os
import socket
import threading
import time

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_encoder import TinyEncoder

from lattqe.errors import LattqeError
from lattqe.extraction.encoder import ImageEncoder
from lattqe.extraction.image import Framing, ImageEntry, decode
from lattqe.extraction.stage import Describer
from lattqe.store import UnavailableError, open_place

CPU = torch.device("cpu")


def encoder(network=None):
    return ImageEncoder(network or TinyEncoder().eval(), CPU, "test", "digest")


@pytest.fixture
def folder(tmp_path):
    """Twelve images of three sizes, and three files that are none."""
    rng = np.random.default_rng(0)
    for number in range(12):
        size = ((40, 30), (30, 40), (33, 33))[number % 3]
        image = Image.fromarray(rng.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8))
        image.save(tmp_path / f"{number:02}.png")
    (tmp_path / "03.png").write_bytes(b"")
    (tmp_path / "07.png").write_bytes(b"no image")
    (tmp_path / "11.png").unlink()
    return tmp_path


def entries():
    return [ImageEntry(f"{number:02}", f"{number:02}.png") for number in range(12)]


def describer(folder, **options):
    options = {"framing": Framing(size=32), "scales": (1.0, 0.5), **options}
    return Describer(options.pop("encoder", None) or encoder(), 16, open_place(str(folder)), **options)


@pytest.mark.parametrize("threads", [1, 3])
def test_block_against_one_image_at_a_time(folder, threads):
    block = describer(folder, threads=threads).describe(entries())
    assert [row for row, reason in enumerate(block.reasons) if reason] == [3, 7, 11]
    assert block.reasons[3] == "empty file"
    assert block.reasons[7] == "not an image of a known format"
    assert block.reasons[11] == "missing file"
    assert block.bad == 3
    for row in range(12):
        if block.reasons[row]:
            assert not block.vectors[row].any()
            continue
        pixels = torch.from_numpy(decode((folder / f"{row:02}.png").read_bytes(), Framing(size=32)).copy())[None]
        np.testing.assert_array_equal(block.vectors[row], encoder().describe(pixels, (1.0, 0.5)).numpy()[0])


@pytest.mark.parametrize("batch", [2, 3, 50])
def test_batches_gather_images_of_one_size(folder, batch):
    seen = []

    class Watched(TinyEncoder):
        def forward(self, x):
            seen.append(tuple(x.shape))
            return super().forward(x)

    block = describer(folder, batch=batch, scales=(1.0,), encoder=encoder(Watched().eval())).describe(entries())
    single = describer(folder, scales=(1.0,)).describe(entries())
    assert block.reasons == single.reasons
    np.testing.assert_allclose(block.vectors, single.vectors, atol=1e-6)
    assert sum(shape[0] for shape in seen) == 9
    assert max(shape[0] for shape in seen) == min(batch, 3)
    assert len({shape[2:] for shape in seen}) == 3


def test_result_does_not_depend_on_timing(folder, monkeypatch):
    blocks = []
    for seed in range(3):
        generator = np.random.default_rng(seed)
        slow = describer(folder, threads=4, batch=2)

        def dawdling(entry, decode_one=slow._decode, generator=generator):
            time.sleep(generator.random() / 200)
            return decode_one(entry)

        monkeypatch.setattr(slow, "_decode", dawdling)
        blocks.append(slow.describe(entries()))
    for block in blocks[1:]:
        np.testing.assert_array_equal(block.vectors, blocks[0].vectors)
        assert block.reasons == blocks[0].reasons


def test_next_block_decodes_while_one_has_the_network(folder):
    """The second block's first images are decoded before the first block lets go of the network."""
    running, go_on, decoded = threading.Event(), threading.Event(), threading.Event()

    class Slow(TinyEncoder):
        def forward(self, x):
            running.set()
            assert go_on.wait(20)
            return super().forward(x)

    both = describer(folder, threads=2, encoder=encoder(Slow().eval()))
    original = both._decode
    both._decode = lambda entry: (decoded.set() if entry.id == "second" else None, original(entry))[1]
    first = threading.Thread(target=both.describe, args=(entries()[:2],))
    first.start()
    assert running.wait(20)
    second = threading.Thread(target=both.describe, args=([ImageEntry("second", "00.png")],))
    second.start()
    try:
        assert decoded.wait(20), "the second block did not read ahead"
        assert both._network.locked()
    finally:
        go_on.set()
        first.join(20)
        second.join(20)


def test_encoders_faults_are_reasons(folder):
    def picky(x):
        if x.shape[2] > x.shape[3]:
            raise AssertionError("Guard failed: height")
        if x.shape[2] < x.shape[3]:
            return torch.full((1, 16), float("nan"))
        return torch.zeros(1, 16)

    block = describer(folder, encoder=encoder(picky)).describe(entries()[:3])
    assert [reason.split(":")[0] for reason in block.reasons] == [
        "the encoder gives NaN or infinity",
        "refused by the encoder",
        "the encoder gives a zero vector",
    ]
    assert not block.vectors.any()


def test_a_broken_encoder_is_not_the_images_fault(folder):
    def broken(x):
        return {}["no such key"]

    with pytest.raises(LattqeError, match=r"failed with KeyError: 'no such key' \(.*extraction_pipeline\.py, line"):
        describer(folder, encoder=encoder(broken)).describe(entries())


def test_out_of_memory_is_not_the_images_fault(folder):
    def hungry(x):
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(LattqeError, match="ran out of memory on 1 images of 32×24: use a smaller --batch"):
        describer(folder, encoder=encoder(hungry)).describe(entries())


def test_storage_out_of_reach_is_not_the_images_fault(folder, monkeypatch):
    block = describer(folder)

    def unavailable(name):
        raise UnavailableError("the server does not answer")

    monkeypatch.setattr(block.place, "size", unavailable)
    with pytest.raises(UnavailableError):
        block.describe(entries())


def test_files_too_large_are_not_read(folder, monkeypatch):
    monkeypatch.setattr("lattqe.extraction.image.MAX_FILE_BYTES", 1000)
    block = describer(folder).describe([ImageEntry("big", "00.png", 1001), ImageEntry("big too", "01.png")])
    assert block.reasons[0] == "too large: a file of 1001 bytes, over 1000"
    assert block.reasons[1].startswith("too large: a file of")


@pytest.mark.parametrize("name", ["../00.png", "a\nb.png", "sub/none.png", "00.png/inside.png"])
def test_names_that_cannot_be_read_are_reasons(folder, name):
    block = describer(folder).describe([ImageEntry("odd", name)])
    assert block.reasons[0].startswith(("cannot be read", "missing file"))


def test_a_folder_in_the_place_of_an_image(folder):
    (folder / "folder.png").mkdir()
    block = describer(folder).describe([ImageEntry("folder", "folder.png", 4096)])
    assert block.reasons[0].startswith("cannot be read")


def test_all_bad_is_a_block_too(folder):
    block = describer(folder).describe([ImageEntry("none", "none.png")])
    assert block.vectors.shape == (1, 16)
    assert block.bad == 1


def test_what_is_no_regular_file_is_a_reason_and_never_waited_for(folder):
    """Opening a pipe that has no writer waits for ever; a device may never end."""
    os.mkfifo(folder / "pipe.png")
    (folder / "device.png").symlink_to("/dev/zero")
    with socket.socket(socket.AF_UNIX) as listener:
        here = os.getcwd()
        os.chdir(folder)  # the name of a socket must be short
        try:
            listener.bind("socket.png")
        finally:
            os.chdir(here)
    strange = [ImageEntry(name, f"{name}.png", size) for name in ("pipe", "device", "socket") for size in (-1, 0)]
    block = describer(folder).describe([*strange, *entries()[:2]])
    assert set(block.reasons[:6]) == {"not a regular file but a pipe, socket or device"}
    assert block.reasons[6:] == ["", ""]
