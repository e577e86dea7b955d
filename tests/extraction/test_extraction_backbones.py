"""Backbones of other packages with random weights: the package's own numbers and preparation, and what is refused."""

import importlib
import io
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from jobs import cli
from lattqe.errors import LattqeError
from lattqe.extraction.backbones import open_backbone, read_state
from lattqe.extraction.encoder import EncoderSpec, open_encoder
from lattqe.extraction.image import Framing, decode
from lattqe.extraction.resnet import GeM

CPU = torch.device("cpu")


def package(name):
    """The package, or a skip that says how to get it.

    A torchvision that was built for another torch lacks its operators for detection. No network here uses them, but it
    wants their names when it is imported.
    """
    found = importlib.util.find_spec(name)
    if found is None:
        pytest.skip(f"{name} is not installed: pip install 'lattqe[backbones]'")
    try:
        return importlib.import_module(name)
    except RuntimeError as error:
        if "operator torchvision::" not in str(error):
            raise
    source = Path(importlib.util.find_spec("torchvision").origin).with_name("_meta_registrations.py").read_text()
    for operator in set(re.findall(r'(?:register_meta\("|torchvision::)(\w+)"', source)):
        OPERATORS.define(f"{operator}(Tensor x) -> Tensor")
    return importlib.import_module(name)


OPERATORS = torch.library.Library("torchvision", "FRAGMENT")


@pytest.fixture(scope="module")
def picture():
    rng = np.random.default_rng(0)
    y, x = np.mgrid[0:300, 0:400]
    waves = np.stack([128 + 90 * np.sin(x / 19), 128 + 90 * np.cos(y / 17), (x + y) / 3], axis=2)
    return Image.fromarray((waves + rng.normal(0, 3, waves.shape)).clip(0, 255).astype(np.uint8))


def saved(network, path):
    """The state dict as people have it: .safetensors, or .pth below 'state_dict'."""
    if path.suffix == ".safetensors":
        from safetensors.torch import save_file

        save_file({key: value.contiguous() for key, value in network.state_dict().items()}, str(path))
    else:
        torch.save({"state_dict": {f"module.{key}": value for key, value in network.state_dict().items()}}, path)
    return str(path)


def encoded(picture):
    file = io.BytesIO()
    picture.save(file, "PNG")
    return file.getvalue()


def described(model, weights, picture, pool="auto"):
    """What `lattqe extract` computes of one picture: (1, D)."""
    encoder = open_encoder(EncoderSpec(model=model, weights=weights, pool=pool), CPU)
    framing = Framing(1024, encoder.side, share=encoder.share, filter=encoder.filter)
    pixels = torch.from_numpy(decode(encoded(picture), framing).copy())[None]
    return encoder.describe(pixels)


def unit(vectors):
    return torch.nn.functional.normalize(vectors, dim=1)


@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
def test_timm_transformer_against_timm_itself(tmp_path, picture, suffix):
    """Timm's own transform, network and CLS token."""
    timm = package("timm")
    torch.manual_seed(0)
    network = timm.create_model("vit_tiny_patch16_224", pretrained=False).eval()
    weights = saved(network, tmp_path / f"weights{suffix}")
    config = timm.data.resolve_model_data_config(network)
    transform = timm.data.create_transform(**config, is_training=False)
    with torch.inference_mode():
        expected = unit(network.forward_features(transform(picture)[None])[:, 0])
    found = described("timm:vit_tiny_patch16_224", weights, picture)
    # The square is cut before scaling, not after: the outermost pixels differ by a rounding.
    assert float((found * expected).sum()) > 0.999
    other = described("timm:vit_tiny_patch16_224", weights, picture.rotate(90))
    assert float((found * other).sum()) < float((found * expected).sum()) - 1e-4


def test_timm_convolutions_with_gem(tmp_path, picture):
    timm = package("timm")
    torch.manual_seed(0)
    network = timm.create_model("resnet18", pretrained=False).eval()
    weights = saved(network, tmp_path / "weights.safetensors")
    images = torch.randn(2, 3, 96, 128)
    opened, _ = open_backbone("timm:resnet18", weights, "auto", CPU)
    assert (opened.pool, opened.side, opened.filter) == ("gem", 224, "bicubic")
    with torch.inference_mode():
        maps = network.forward_features(images)
        torch.testing.assert_close(opened.network(images), GeM(3.0)(maps))
        mean, _ = open_backbone("timm:resnet18", weights, "mean", CPU)
        torch.testing.assert_close(mean.network(images), maps.mean(dim=(2, 3)))
    assert described("timm:resnet18", weights, picture).shape == (1, 512)


def test_timm_patch_tokens_and_other_sizes(tmp_path):
    """GeM over patches leaves the CLS token out; a size that is no square of the network's works too."""
    timm = package("timm")
    torch.manual_seed(0)
    network = timm.create_model("vit_tiny_patch16_224", pretrained=False, dynamic_img_size=True).eval()
    weights = saved(network, tmp_path / "weights.safetensors")
    opened, _ = open_backbone("timm:vit_tiny_patch16_224", weights, "gem", CPU)
    images = torch.randn(1, 3, 160, 128)
    with torch.inference_mode():
        patches = network.forward_features(images)[:, 1:]
        expected = patches.clamp(min=1e-6).pow(3).mean(dim=1).pow(1 / 3)
        torch.testing.assert_close(opened.network(images), expected)


@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v3_small", "efficientnet_b0", "regnet_y_400mf"])
def test_torchvision_convolutions(tmp_path, picture, name):
    """GeM in the place of the average: with p = 1 it would be torchvision's own pooling."""
    torchvision = package("torchvision")
    torch.manual_seed(0)
    network = torchvision.models.get_model(name, weights=None).eval()
    weights = saved(network, tmp_path / "weights.pth")
    seen = []
    network.avgpool.register_forward_hook(lambda module, inputs, output: seen.append((inputs[0], output)))
    images = torch.randn(1, 3, 96, 96)
    with torch.inference_mode():
        network(images)
        maps, pooled = seen[0]
        opened, _ = open_backbone(f"torchvision:{name}", weights, "mean", CPU)
        torch.testing.assert_close(opened.network(images), pooled.flatten(1), atol=1e-5, rtol=1e-4)
        opened, _ = open_backbone(f"torchvision:{name}", weights, "auto", CPU)
        torch.testing.assert_close(opened.network(images), GeM(3.0)(maps), atol=1e-5, rtol=1e-4)
    transforms = torchvision.models.get_model_weights(name).DEFAULT.transforms()
    assert (opened.side, opened.mean) == (transforms.crop_size[0], tuple(transforms.mean))
    expected = open_encoder(EncoderSpec(model=f"torchvision:{name}", weights=weights), CPU)
    with torch.inference_mode():
        wanted = unit(GeM(3.0)(_maps(network, transforms(picture)[None])))
    assert float((described(f"torchvision:{name}", weights, picture) * wanted).sum()) > 0.995
    assert expected.kind == f"torchvision:{name}, pooling gem"


def _maps(network, images):
    seen = []
    handle = network.avgpool.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0]))
    network(images)
    handle.remove()
    return seen[-1]


def test_torchvision_transformer(tmp_path):
    torchvision = package("torchvision")
    torch.manual_seed(0)
    network = torchvision.models.vit_b_32(weights=None).eval()
    weights = saved(network, tmp_path / "weights.pth")
    opened, _ = open_backbone("torchvision:vit_b_32", weights, "auto", CPU)
    network.heads = torch.nn.Identity()
    images = torch.randn(1, 3, 224, 224)
    with torch.inference_mode():
        torch.testing.assert_close(opened.network(images), network(images))
    assert opened.pool == "cls"
    with pytest.raises(LattqeError, match="use --pool cls"):
        open_backbone("torchvision:vit_b_32", weights, "gem", CPU)


def test_open_clip(tmp_path):
    open_clip = package("open_clip")
    torch.manual_seed(0)
    network = open_clip.create_model("ViT-S-32-alt", pretrained=None).eval()
    weights = saved(network, tmp_path / "weights.pth")
    opened, _ = open_backbone("open_clip:ViT-S-32-alt", weights, "auto", CPU)
    images = torch.randn(1, 3, opened.side, opened.side)
    with torch.inference_mode():
        torch.testing.assert_close(opened.network(images), network.encode_image(images))
    config = open_clip.get_model_preprocess_cfg(network)
    assert (opened.mean, opened.std) == (tuple(config["mean"]), tuple(config["std"]))


@pytest.mark.parametrize(
    ("model", "pool", "message"),
    [
        ("timm:no_such_network", "auto", "timm:no_such_network cannot be made"),
        ("timm:resnet18", "cls", "has no CLS token"),
        ("timm:resnet34", "auto", "are not the weights of timm:resnet34: it lacks"),
        ("timm:resnet18", "sum", "--pool 'sum' is not known"),
    ],
)
def test_wrong_names_poolings_and_weights_are_refused(tmp_path, model, pool, message):
    timm = package("timm")
    weights = saved(timm.create_model("resnet18", pretrained=False), tmp_path / "weights.safetensors")
    with pytest.raises(LattqeError, match=re.escape(message)):
        open_backbone(model, weights, pool, CPU)


@pytest.mark.parametrize("model", ["keras:resnet50", "timm", "timm:", "timm:hf_hub:someone/net", "timm:../net"])
def test_models_that_are_none(model, tmp_path):
    with pytest.raises(LattqeError, match="write timm:NAME, torchvision:NAME or open_clip:NAME"):
        open_backbone(model, None, "auto", CPU)


def test_nothing_is_downloaded():
    with pytest.raises(LattqeError, match="needs --weights FILE"):
        open_backbone("timm:resnet18", None, "auto", CPU)


def test_weight_files_that_are_none(tmp_path):
    for name, content, message in (
        ("a.safetensors", b"nothing", "not a readable safetensors file"),
        ("a.pth", b"nothing", "refused, it is not a file of plain tensors"),
    ):
        with pytest.raises(LattqeError, match=message):
            read_state(content, name)
    file = io.BytesIO()
    torch.save([1, 2], file)
    with pytest.raises(LattqeError, match="holds no state dict"):
        read_state(file.getvalue(), "a.pth")


def test_one_source_of_descriptors_only():
    for wrong in ({}, {"checkpoint": "a", "model": "timm:a"}, {"hook": "a:b", "checkpoint": "a"}):
        with pytest.raises(LattqeError, match="give one of --checkpoint"):
            EncoderSpec(**wrong)
    with pytest.raises(LattqeError, match="need --model"):
        EncoderSpec(checkpoint="a", weights="b")


def test_share_of_the_central_square(picture):
    """Against cutting by hand."""
    found = decode(encoded(picture), Framing(center_crop=112, share=0.5, filter="bilinear"))
    expected = picture.crop((125, 75, 275, 225)).resize((112, 112), Image.Resampling.BILINEAR)
    # Filters look one pixel beyond the square, which a cut by hand has not.
    np.testing.assert_array_equal(found[1:-1, 1:-1], np.asarray(expected)[1:-1, 1:-1])
    for wrong in ({"share": 0.0}, {"share": 1.5}, {"filter": "nearest"}):
        with pytest.raises(LattqeError, match="cannot be made"):
            Framing(**wrong)


def test_without_a_network_three_lines_say_how_to_get_descriptors(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["lattqe", "extract", str(tmp_path), "--to", str(tmp_path / "out")])
    with pytest.raises(SystemExit) as end:
        cli.main()
    lines = capsys.readouterr().err.splitlines()
    assert end.value.code == 2
    assert [bool(re.search(r"lattqe (extract|import) \S+ --", line)) for line in lines] == [True, True, True, False]
    assert lines[3].startswith("error: no network given")
