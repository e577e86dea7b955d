"""The kinds of encoder: a published file, TorchScript, torch.export, a Python function."""

import math
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_encoder import TinyEncoder

from lattqe.errors import LattqeError
from lattqe.extraction.encoder import PUBLISHED_SCALES, EncoderSpec, file_kind, find_hook_folder, open_encoder

CPU = torch.device("cpu")
HERE = "tiny_encoder"


def pixels(height=40, width=56, count=1):
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (count, height, width, 3), dtype=torch.uint8, generator=generator)


def normalised_images(values, mean, std):
    return ((values.float() / 255 - torch.tensor(mean)) / torch.tensor(std)).permute(0, 3, 1, 2)


def slow_describe(network, values, mean, std, scales, power):
    """One image and one scale at a time, as the published extraction loop does."""
    rows = []
    for image in normalised_images(values, mean, std):
        total = 0
        for scale in scales:
            size = [math.floor(side * scale) for side in image.shape[1:]]
            resized = torch.nn.functional.interpolate(image[None], size=size, mode="bilinear", align_corners=False)
            total = total + network(resized)[0] ** power
        vector = (total / len(scales)) ** (1 / power)
        rows.append(vector / vector.norm())
    return torch.stack(rows)


@pytest.mark.slow
@pytest.mark.parametrize("whitening", [True, False])
def test_published_file(network, published, tmp_path, whitening):
    state = network.state_dict()
    if not whitening:
        state = {key: value for key, value in state.items() if not key.startswith("whiten")}
    mean, std = [0.4, 0.5, 0.6], [0.2, 0.3, 0.4]
    (tmp_path / "net.pth").write_bytes(published(state, whitening=whitening, mean=mean, std=std))
    encoder = open_encoder(EncoderSpec(str(tmp_path / "net.pth")), CPU)
    assert encoder.kind == ("resnet50 + GeM + whitening" if whitening else "resnet50 + GeM")
    # The published code: plain mean over scales for whitened networks, GeM's own exponent for others.
    assert encoder.scale_power == pytest.approx(1.0 if whitening else 2.9)
    with torch.device("meta"):  # all its numbers come from the state
        plain = type(network)("resnet50", whitening).eval()
    plain.load_state_dict(state, assign=True)
    with torch.inference_mode():
        expected = slow_describe(plain, pixels(), mean, std, PUBLISHED_SCALES, encoder.scale_power)
    got = encoder.describe(pixels(), PUBLISHED_SCALES)
    np.testing.assert_allclose(got.numpy(), expected.numpy(), atol=2e-6)
    assert encoder.output_dim(32) == 2048


def test_torchscript(tmp_path):
    torch.jit.save(torch.jit.script(TinyEncoder()), tmp_path / "net.ts")
    assert file_kind((tmp_path / "net.ts").read_bytes()) == "torchscript"
    check_tiny(open_encoder(EncoderSpec(str(tmp_path / "net.ts"), mean=(0.1, 0.2, 0.3), std=(0.9, 0.8, 0.7)), CPU))


@pytest.mark.slow
def test_torch_export(tmp_path):
    dim = torch.export.Dim
    shapes = ({0: dim("n"), 2: dim("h", min=4), 3: dim("w", min=4)},)
    program = torch.export.export(TinyEncoder().eval(), (torch.randn(2, 3, 64, 48),), dynamic_shapes=shapes)
    torch.export.save(program, tmp_path / "net.pt2")
    assert file_kind((tmp_path / "net.pt2").read_bytes()) == "torch.export"
    check_tiny(open_encoder(EncoderSpec(str(tmp_path / "net.pt2"), mean=(0.1, 0.2, 0.3), std=(0.9, 0.8, 0.7)), CPU))


def check_tiny(encoder):
    with torch.inference_mode():
        expected = slow_describe(TinyEncoder(), pixels(count=2), (0.1, 0.2, 0.3), (0.9, 0.8, 0.7), (1.0, 0.5), 1.0)
    np.testing.assert_allclose(encoder.describe(pixels(count=2), (1.0, 0.5)).numpy(), expected.numpy(), atol=1e-6)
    assert encoder.output_dim(64) == 16


def test_python_function():
    encoder = open_encoder(EncoderSpec(hook=f"{HERE}:make"), CPU)
    assert (encoder.mean, encoder.std) == ((0.5, 0.5, 0.5), (0.25, 0.25, 0.25))
    with torch.inference_mode():
        expected = slow_describe(TinyEncoder(), pixels(), encoder.mean, encoder.std, (1.0,), 1.0)
    np.testing.assert_allclose(encoder.describe(pixels()).numpy(), expected.numpy(), atol=1e-6)
    assert encoder.digest == open_encoder(EncoderSpec(hook=f"{HERE}:make"), CPU).digest


def test_hooks_are_found_in_modules_packages_and_the_current_folder(tmp_path, monkeypatch):
    (tmp_path / "my_package").mkdir()
    (tmp_path / "my_package" / "__init__.py").touch()
    (tmp_path / "my_package" / "inner.py").write_text("def make(device):\n    return lambda x: x.mean((2, 3))\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", list(sys.path))
    assert find_hook_folder("my_package.inner:make") == str(tmp_path)
    assert find_hook_folder(f"{HERE}:make") == str(Path(__file__).parent.parent)
    assert find_hook_folder("no_such_module:make") is None
    encoder = open_encoder(EncoderSpec(hook="my_package.inner:make", hook_folder=str(tmp_path)), CPU)
    assert encoder.output_dim(8) == 3


@pytest.mark.parametrize(
    ("hook", "message"),
    [
        ("no_such_module:make", "ModuleNotFoundError"),
        (f"{HERE}:nothing", "AttributeError"),
        (HERE, "AttributeError"),
        (f"{HERE}:make_number", "gave a int, which cannot be called"),
    ],
)
def test_wrong_hooks_are_named(hook, message):
    with pytest.raises(LattqeError, match=message):
        open_encoder(EncoderSpec(hook=hook), CPU)


def test_encoder_of_the_wrong_shape_is_named():
    with pytest.raises(LattqeError, match="fails on a 32×32 image"):
        open_encoder(EncoderSpec(hook=f"{HERE}:make_wrong_shape"), CPU).output_dim(32)


def test_exactly_one_source_of_the_encoder():
    for wrong in ({}, {"checkpoint": "a.pth", "hook": "b:c"}):
        with pytest.raises(LattqeError, match="give one of --checkpoint FILE"):
            EncoderSpec(**wrong)


def test_damaged_script_is_named(tmp_path):
    with zipfile.ZipFile(tmp_path / "net.ts", "w") as archive:
        archive.writestr("net/code/__torch__.py", "class Nothing(Module):")
    with pytest.raises(LattqeError, match=r"net\.ts: cannot be opened as torchscript"):
        open_encoder(EncoderSpec(str(tmp_path / "net.ts")), CPU)


def test_missing_file_is_named(tmp_path):
    with pytest.raises(LattqeError, match=r"none\.pth"):
        open_encoder(EncoderSpec(str(tmp_path / "none.pth")), CPU)
