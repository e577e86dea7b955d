"""The network against a plain functional one that knows nothing but the published key names and the paper's table."""

import pytest
import torch
from torch.nn import functional as F

from lattqe.errors import LattqeError
from lattqe.extraction.resnet import GeM, RetrievalNet, fold_batch_norm

BLOCKS = {"resnet50": [3, 4, 6, 3], "resnet101": [3, 4, 23, 3], "resnet152": [3, 8, 36, 3]}


def randomised(architecture, whitening=True, seed=0):
    """A network whose every entry, batch statistics too, is random and of a size that keeps activations near 1."""
    with torch.device("meta"):
        network = RetrievalNet(architecture, whitening)
    generator = torch.Generator().manual_seed(seed)
    network = network.to_empty(device="cpu").eval()
    for key, value in network.state_dict().items():
        if value.dim() == 4:
            value.uniform_(-1, 1, generator=generator).mul_((3 / value[0].numel()) ** 0.5)
        elif key.endswith(("running_var", "bn1.weight", "bn2.weight", ".1.weight")):
            value.uniform_(0.5, 1.5, generator=generator)
        elif key.endswith("bn3.weight"):
            value.uniform_(0.1, 0.4, generator=generator)
        elif key == "pool.p":
            value.fill_(2.7)
        elif value.is_floating_point():
            value.uniform_(-0.1, 0.1, generator=generator)
    return network


def plain_steps(state, architecture, x):
    """The forward pass written out with functions, as (name, activation) after every step."""

    def conv_bn(x, conv, bn, stride=1, padding=0):
        x = F.conv2d(x, state[f"{conv}.weight"], stride=stride, padding=padding)
        mean, variance, gain, bias = (
            state[f"{bn}.{name}"].view(1, -1, 1, 1) for name in ("running_mean", "running_var", "weight", "bias")
        )
        return (x - mean) / torch.sqrt(variance + 1e-5) * gain + bias

    x = F.relu(conv_bn(x, "features.0", "features.1", stride=2, padding=3))
    yield "features.2", x
    x = F.max_pool2d(F.pad(x, (1, 1, 1, 1), value=float("-inf")), 3, 2)
    yield "features.3", x
    for stage, count in enumerate(BLOCKS[architecture]):
        for block in range(count):
            name = f"features.{4 + stage}.{block}"
            stride = 2 if block == 0 and stage > 0 else 1
            y = F.relu(conv_bn(x, f"{name}.conv1", f"{name}.bn1"))
            y = F.relu(conv_bn(y, f"{name}.conv2", f"{name}.bn2", stride=stride, padding=1))
            y = conv_bn(y, f"{name}.conv3", f"{name}.bn3")
            if block == 0:
                x = conv_bn(x, f"{name}.downsample.0", f"{name}.downsample.1", stride=stride)
            x = F.relu(x + y)
            yield name, x
    p = state["pool.p"].item()
    x = (x.clamp(min=1e-6) ** p).flatten(2).mean(2) ** (1 / p)
    yield "pool", x
    x = x / (x.norm(dim=1, keepdim=True) + 1e-6)
    if "whiten.weight" in state:
        x = x @ state["whiten.weight"].T + state["whiten.bias"]
        yield "whiten", x
        x = x / (x.norm(dim=1, keepdim=True) + 1e-6)
    yield "", x


@pytest.mark.parametrize(
    ("architecture", "size"), [("resnet50", (65, 97)), ("resnet101", (33, 64)), ("resnet152", (32, 32))]
)
def test_forward_equals_the_plain_one_layer_by_layer(architecture, size):
    network = randomised(architecture)
    seen = {}
    for name, module in network.named_modules():
        module.register_forward_hook(lambda _, __, out, name=name: seen.update({name: out.clone()}))
    x = torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        network(x)
        steps = list(plain_steps(network.state_dict(), architecture, x))
    assert len(steps) == 2 + sum(BLOCKS[architecture]) + 3
    for name, expected in steps:
        error = (seen[name] - expected).abs().max() / expected.abs().max()
        assert error < 1e-4, (name, error)


@pytest.mark.parametrize(("architecture", "entries"), [("resnet50", 321), ("resnet101", 627), ("resnet152", 933)])
def test_published_key_layout(architecture, entries):
    """Every convolution of the table is there under its published name and shape, and nothing else is."""
    expected = {"pool.p": (1,), "whiten.weight": (2048, 2048), "whiten.bias": (2048,)}

    def add(conv, bn, out, inside, kernel):
        expected[f"{conv}.weight"] = (out, inside, kernel, kernel)
        expected.update({f"{bn}.{name}": (out,) for name in ("weight", "bias", "running_mean", "running_var")})
        expected[f"{bn}.num_batches_tracked"] = ()

    add("features.0", "features.1", 64, 3, 7)
    inside = 64
    for stage, count in enumerate(BLOCKS[architecture]):
        width = 64 << stage
        for block in range(count):
            name = f"features.{4 + stage}.{block}"
            add(f"{name}.conv1", f"{name}.bn1", width, inside, 1)
            add(f"{name}.conv2", f"{name}.bn2", width, width, 3)
            add(f"{name}.conv3", f"{name}.bn3", 4 * width, width, 1)
            if block == 0:
                add(f"{name}.downsample.0", f"{name}.downsample.1", 4 * width, inside, 1)
            inside = 4 * width
    with torch.device("meta"):
        state = RetrievalNet(architecture).state_dict()
    assert {key: tuple(value.shape) for key, value in state.items()} == expected
    assert len(expected) == entries


def test_gem_against_a_loop():
    x = torch.randn(2, 5, 3, 4, generator=torch.Generator().manual_seed(0))
    gem = GeM(p=2.5)
    out = gem(x)
    for image in range(2):
        for channel in range(5):
            values = [max(float(value), 1e-6) ** 2.5 for value in x[image, channel].flatten()]
            assert float(out[image, channel]) == pytest.approx((sum(values) / len(values)) ** (1 / 2.5), rel=1e-5)


def test_gem_between_mean_and_maximum():
    x = torch.rand(1, 8, 6, 6) + 0.1
    torch.testing.assert_close(GeM(1.0)(x), x.mean(dim=(2, 3)))
    torch.testing.assert_close(GeM(200.0)(x.double()), x.double().amax(dim=(2, 3)), rtol=0.03, atol=0)


def test_folded_network_computes_the_same():
    network = randomised("resnet50")
    x = torch.randn(1, 3, 64, 48)
    with torch.inference_mode():
        folded = fold_batch_norm(network)
        torch.testing.assert_close(folded(x), network(x), rtol=0, atol=2e-6)
    assert not any(isinstance(module, torch.nn.BatchNorm2d) for module in folded.modules())
    assert any(isinstance(module, torch.nn.BatchNorm2d) for module in network.modules()), "the original is left alone"


def test_unknown_architecture_is_refused_by_name():
    with pytest.raises(LattqeError, match="'vgg16' is not known: use one of resnet50, resnet101, resnet152"):
        RetrievalNet("vgg16")
