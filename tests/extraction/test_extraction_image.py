"""Decoding: modes, EXIF, crops and scales against slow twins; damaged files give reasons, bombs are never decoded."""

import contextlib
import io
import math
import resource
import struct
import zlib
from functools import cache

import numpy as np
import pytest
from PIL import Image

from lattqe.errors import LattqeError
from lattqe.extraction.image import FORMATS, UPRIGHT, BadImage, Framing, decode, fitted_size

FULL = Framing(size=4096)


def encoded(image, format="PNG", **options):
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


@pytest.fixture(scope="module")
def photo():
    """A smooth picture with noise, 60 × 40: JPEG keeps it nearly."""
    rng = np.random.default_rng(0)
    y, x = np.mgrid[0:40, 0:60]
    waves = np.stack([128 + 90 * np.sin(x / 9), 128 + 90 * np.cos(y / 7), 2 * x + 3 * y], axis=2)
    return Image.fromarray((waves + rng.normal(0, 3, waves.shape)).clip(0, 255).astype(np.uint8))


def test_rgb_is_kept(photo):
    np.testing.assert_array_equal(decode(encoded(photo), FULL), np.asarray(photo))


@pytest.mark.parametrize("format", FORMATS)
def test_formats(photo, format):
    pixels = decode(encoded(photo, format), FULL).astype(int)
    assert pixels.shape == (40, 60, 3)
    assert np.abs(pixels - np.asarray(photo)).mean() < 12


def test_grey_is_repeated(photo):
    grey = photo.convert("L")
    np.testing.assert_array_equal(decode(encoded(grey), FULL), np.repeat(np.asarray(grey)[:, :, None], 3, axis=2))


def test_one_bit():
    bits = Image.fromarray(np.array([[0, 255], [255, 0]], dtype=np.uint8)).convert("1")
    np.testing.assert_array_equal(decode(encoded(bits), FULL)[:, :, 1], [[0, 255], [255, 0]])


def test_palette(photo):
    indexed = photo.quantize(16)
    np.testing.assert_array_equal(decode(encoded(indexed), FULL), np.asarray(indexed.convert("RGB")))


def test_cmyk():
    ink = Image.new("CMYK", (8, 8), (0, 255, 255, 0))
    assert np.abs(decode(encoded(ink, "TIFF"), FULL).astype(int) - [255, 0, 0]).max() == 0
    assert np.abs(decode(encoded(ink, "JPEG"), FULL).astype(int) - [255, 0, 0]).max() < 4


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "RGB"])
def test_transparency_is_laid_over_white(mode):
    """Against the formula c·a + 255·(1 - a), for alpha channels, transparent palette entries and colour keys."""
    if mode in ("RGBA", "LA"):
        values = np.zeros((4, 4, len(mode)), dtype=np.uint8)
        values[..., 0], values[..., -1] = 200, np.arange(0, 256, 16).reshape(4, 4)
        pixels = decode(encoded(Image.fromarray(values, mode)), FULL)
        alpha = values[..., -1] / 255
        np.testing.assert_allclose(pixels[..., 0], 200 * alpha + 255 * (1 - alpha), atol=1)
        return
    image = Image.new(mode, (2, 1), 0)
    image.putpixel((1, 0), 1 if mode == "P" else (9, 9, 9))
    if mode == "P":
        image.putpalette([0, 0, 0, 9, 9, 9])
    data = encoded(image, transparency=0 if mode == "P" else (0, 0, 0))
    np.testing.assert_array_equal(decode(data, FULL)[0], [[255] * 3, [9] * 3])


@pytest.mark.parametrize("format", ["PNG", "TIFF", "PPM"])
def test_sixteen_bits_are_scaled_not_clipped(format):
    values = np.array([[0, 257, 128 * 257, 65535]], dtype=np.uint16)
    pixels = decode(encoded(Image.fromarray(values), format), FULL)
    np.testing.assert_array_equal(pixels[0, :, 0], [0, 1, 128, 255])


def test_ranges_without_a_convention_are_refused():
    with pytest.raises(BadImage, match="floating-point"):
        decode(encoded(Image.fromarray(np.ones((2, 2), dtype=np.float32)), "TIFF"), FULL)
    with pytest.raises(BadImage, match="beyond 16 bits"):
        decode(encoded(Image.fromarray(np.full((2, 2), 70_000, dtype=np.int32)), "TIFF"), FULL)


@pytest.mark.parametrize("format", ["GIF", "WEBP", "PNG"])
def test_animation_gives_its_first_frame(format):
    red, blue = Image.new("RGB", (8, 8), (255, 0, 0)), Image.new("RGB", (8, 8), (0, 0, 255))
    options = {"lossless": True} if format == "WEBP" else {}
    data = encoded(red, format, save_all=True, append_images=[blue], duration=100, **options)
    np.testing.assert_array_equal(decode(data, FULL)[4, 4], [255, 0, 0])


ROTATIONS = {
    1: lambda a: a,
    2: np.fliplr,
    3: lambda a: np.rot90(a, 2),
    4: np.flipud,
    5: lambda a: a.transpose(1, 0, 2),
    6: lambda a: np.rot90(a, -1),
    7: lambda a: np.rot90(a, 2).transpose(1, 0, 2),
    8: np.rot90,
}


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("format", ["PNG", "TIFF"])
def test_exif_orientation(photo, orientation, format):
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(photo, format, exif=exif)
    np.testing.assert_array_equal(decode(data, FULL), ROTATIONS[orientation](np.asarray(photo)))
    assert set(UPRIGHT) == set(ROTATIONS) - {1}


def test_exif_can_be_ignored_and_may_be_damaged(photo):
    exif = Image.Exif()
    exif[0x0112] = 6
    data = encoded(photo, exif=exif)
    np.testing.assert_array_equal(decode(data, Framing(size=4096, exif=False)), np.asarray(photo))
    broken = encoded(photo, "JPEG", exif=b"Exif\x00\x00II*\x00\xff\xff\xff\xff")
    assert decode(broken, FULL).shape == (40, 60, 3)


@pytest.mark.parametrize("size", [(60, 40), (61, 40), (40, 60), (37, 23), (60, 1), (1, 1)])
@pytest.mark.parametrize("limit", [1, 16, 31, 48, 1024])
def test_scaling_against_thumbnail(size, limit):
    """The published pipeline shrinks with Pillow's thumbnail; ours gives its very pixels."""
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8))
    expected = noise.copy()
    expected.thumbnail((limit, limit), Image.Resampling.LANCZOS, reducing_gap=None)
    np.testing.assert_array_equal(decode(encoded(noise), Framing(size=limit)), np.asarray(expected))
    assert fitted_size(*size, limit) == expected.size


@pytest.mark.parametrize("box", [(5, 3, 45, 33), (5.4, 2.6, 44.5, 33.2), (0, 0, 60, 40), (-3, 10, 20, 70)])
@pytest.mark.parametrize("limit", [30, 45, 100])
def test_crop_at_the_scale_of_the_full_image(photo, box, limit):
    """Crop by hand, then shrink the crop's long side to limit × crop / full, as the published pipeline does."""
    x1, y1, x2, y2 = (round(corner) for corner in box)
    cut = Image.fromarray(np.asarray(photo)[max(y1, 0) : min(y2, 40), max(x1, 0) : min(x2, 60)])
    side = math.floor(limit * max(cut.size) / 60)
    cut.thumbnail((side, side), Image.Resampling.LANCZOS, reducing_gap=None)
    np.testing.assert_array_equal(decode(encoded(photo), Framing(size=limit), box), np.asarray(cut))


def test_crop_is_taken_before_turning_upright(photo):
    exif = Image.Exif()
    exif[0x0112] = 6
    pixels = decode(encoded(photo, exif=exif), FULL, (10, 5, 30, 15))
    np.testing.assert_array_equal(pixels, np.rot90(np.asarray(photo)[5:15, 10:30], -1))


@pytest.mark.parametrize("box", [(50, 5, 50, 20), (70, 0, 80, 10), (9, 9, 3, 3)])
def test_empty_crop_is_a_reason(photo, box):
    with pytest.raises(BadImage, match="holds nothing of its 60×40 pixels"):
        decode(encoded(photo), FULL, box)


def test_central_square(photo):
    pixels = decode(encoded(photo), Framing(center_crop=40))
    np.testing.assert_array_equal(pixels, np.asarray(photo)[:, 10:50])
    thin = Image.new("RGB", (30_000, 2), (7, 7, 7))
    assert decode(encoded(thin), Framing(center_crop=64)).shape == (64, 64, 3)


def png_header(width, height):
    """A PNG that promises width × height grey pixels and holds a few bytes of them."""

    def chunk(name, data):
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    chunks = chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(b"\0" * 100)), chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def bmp_header(width, height):
    return b"BM" + struct.pack("<IHHIIiiHHIIiiII", 64, 0, 0, 54, 40, width, height, 1, 24, 0, 0, 0, 0, 0, 0)


@pytest.mark.parametrize(
    "data", [png_header(50_000, 50_000), bmp_header(40_000, 40_000), png_header(9_435, 9_434), b"P5 60000 60000 255\n"]
)
def test_bombs_are_refused_by_their_header(data):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(BadImage, match="too large"):
        decode(data, FULL)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10, "pixels were allocated"


@cache
def bomb():
    """64 KiB that inflate to 64 MiB; made in pieces, so that making it holds no more than a piece."""
    packer = zlib.compressobj(9)
    return b"".join(packer.compress(b"\0" * (1 << 20)) for _ in range(64)) + packer.flush()


def png_with_bomb(name, prefix):
    """A sound 1 × 1 PNG with chunks of 64 KiB that inflate to 64 MiB each."""

    def chunk(name, data):
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", 1, 1, 8, 0, 0, 0, 0)
    large = chunk(name, prefix + bomb())
    pixels = chunk(b"IDAT", zlib.compress(b"\0\0"))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + large * 8 + pixels + chunk(b"IEND", b"")


def tiff_with_tiles(side):
    """A TIFF of 16 × 16 pixels whose header promises one tile of side × side."""
    values = [
        (256, 4, 16),
        (257, 4, 16),
        (258, 3, 8),
        (259, 3, 8),
        (262, 3, 1),
        (277, 3, 1),
        (322, 4, side),
        (323, 4, side),
        (324, 4, 200),
        (325, 4, 1000),
    ]
    entries = b"".join(struct.pack("<HHII", tag, kind, 1, value) for tag, kind, value in values)
    head = b"II*\0" + struct.pack("<I", 8) + struct.pack("<H", len(values)) + entries + b"\0" * 4
    return head.ljust(200, b"\0") + zlib.compress(b"\0" * (1 << 20))


@pytest.mark.parametrize(
    ("make", "arguments"),
    [
        (png_with_bomb, (b"zTXt", b"title\0\0")),
        (png_with_bomb, (b"iTXt", b"title\0\1\0\0\0")),
        (png_with_bomb, (b"iCCP", b"profile\0\0")),
        (tiff_with_tiles, (65_536,)),
    ],
)
def test_bombs_beside_the_pixels(make, arguments):
    """Text, profiles and tiles that inflate a thousandfold: a picture or a reason, and little memory."""
    data = make(*arguments)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with contextlib.suppress(BadImage):
        assert decode(data, FULL).shape[2] == 3
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 192 << 10, "the bomb went off"


def test_limit_of_pixels_is_the_users(photo):
    with pytest.raises(BadImage, match="60×40 by its header, over 2399 pixels"):
        decode(encoded(photo), Framing(max_pixels=2399))
    assert decode(encoded(photo), Framing(max_pixels=2400)).shape == (40, 60, 3)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("kept", [0.9, 0.5, 0.1])
def test_truncated_files_are_refused(photo, format, kept):
    data = encoded(photo, format)
    with pytest.raises(BadImage):
        decode(data[: int(len(data) * kept)], FULL)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "empty file"),
        (b"hello, world", "not an image"),
        (b"\0" * 5000, "not an image"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "not an image"),
        (b"%PDF-1.7\n", "not an image"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n", "not an image"),
        (b"\xff\xd8\xff\xe0", "not an image|decoded"),
    ],
)
def test_what_is_no_image_says_so(data, reason):
    with pytest.raises(BadImage, match=reason):
        decode(data, FULL)


def test_damaged_bytes_never_raise_anything_else(photo):
    """Flip and cut real files at random: pixels or a reason, never another error."""
    rng = np.random.default_rng(0)
    files = [encoded(photo, format) for format in FORMATS]
    outcomes = set()
    for _ in range(400):
        data = bytearray(files[rng.integers(len(files))])
        for position in rng.integers(0, len(data), rng.integers(1, 8)):
            data[position] = rng.integers(256)
        try:
            pixels = decode(bytes(data), Framing(max_pixels=100_000))
            outcomes.add((pixels.dtype.name, pixels.ndim, pixels.shape[-1]))
        except BadImage as error:
            outcomes.add(("one line", len(str(error).splitlines())))
    assert outcomes == {("uint8", 3, 3), ("one line", 1)}


def test_senseless_framing_is_refused():
    for wrong in ({"size": 0}, {"center_crop": -1}, {"max_pixels": 0}):
        with pytest.raises(LattqeError, match="must be at least 1"):
            Framing(**wrong)
