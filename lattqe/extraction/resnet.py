"""ResNet-50/101/152 with GeM pooling and an optional whitening layer: φ of the paper, in torch alone.

The modules are numbered and named as the children of torchvision's ResNet without its pooling and classifier, which is
how cnnimageretrieval-pytorch saves its networks: `features.0.weight` is the first convolution, `features.4` to
`features.7` are the four stages, `pool.p` is GeM's exponent, `whiten.weight` and `whiten.bias` the whitening layer.
A bottleneck strides in its 3×3 convolution (the variant called v1.5), as torchvision's does.
"""

import copy

import torch
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from lattqe.errors import LattqeError

# Bottlenecks in each of the four stages.
STAGES = {"resnet50": (3, 4, 6, 3), "resnet101": (3, 4, 23, 3), "resnet152": (3, 8, 36, 3)}
EXPANSION = 4  # a bottleneck's output channels over its width
FEATURE_DIM = 512 * EXPANSION
EPS = 1e-6  # of GeM's clamp and of the L2 norms, as in the published code


def l2_normalise(x: Tensor) -> Tensor:
    """Divide each row of x (n, D) by its L2 norm plus 1e-6, as the published networks do."""
    return x / (x.norm(dim=1, keepdim=True) + EPS)


class Bottleneck(nn.Module):
    """1×1 → 3×3 (strided) → 1×1 convolutions, each with batch norm, around a residual connection."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        out = width * EXPANSION
        self.conv1 = nn.Conv2d(channels, width, kernel_size=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, kernel_size=3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, out, kernel_size=1, bias=False)
        self.bn3 = nn.BatchNorm2d(out)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if stride != 1 or channels != out:
            self.downsample = nn.Sequential(
                nn.Conv2d(channels, out, kernel_size=1, stride=stride, bias=False), nn.BatchNorm2d(out)
            )

    def forward(self, x: Tensor) -> Tensor:
        """(n, channels, h, w) → (n, 4·width, ⌈h/stride⌉, ⌈w/stride⌉)."""
        shortcut = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        return self.relu(self.bn3(self.conv3(out)) + shortcut)


def resnet_features(architecture: str) -> nn.Sequential:
    """Make the convolutional part: (n, 3, h, w) → (n, 2048, ~h/32, ~w/32), non-negative."""
    if architecture not in STAGES:
        raise LattqeError(f"architecture {architecture!r} is not known: use one of {', '.join(STAGES)}")
    modules: list[nn.Module] = [
        nn.Conv2d(3, 64, kernel_size=7, stride=2, padding=3, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(kernel_size=3, stride=2, padding=1),
    ]
    channels = 64
    for stage, blocks in enumerate(STAGES[architecture]):
        width = 64 * 2**stage
        first = Bottleneck(channels, width, stride=1 if stage == 0 else 2)
        channels = width * EXPANSION
        modules.append(nn.Sequential(first, *(Bottleneck(channels, width, stride=1) for _ in range(blocks - 1))))
    return nn.Sequential(*modules)


class GeM(nn.Module):
    """Generalised mean over positions: (mean of max(x, 1e-6)^p)^(1/p); p = 1 is the average, p → ∞ the maximum."""

    def __init__(self, p: float = 3.0) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.full((1,), p))

    def forward(self, x: Tensor) -> Tensor:
        """(n, D, h, w) → (n, D)."""
        return x.clamp(min=EPS).pow(self.p).mean(dim=(2, 3)).pow(1.0 / self.p)


class RetrievalNet(nn.Module):
    """Images to global descriptors: convolutions, GeM, L2, and where the checkpoint has it a linear layer and L2."""

    def __init__(self, architecture: str = "resnet101", whitening: bool = True) -> None:
        super().__init__()
        self.features = resnet_features(architecture)
        self.pool = GeM()
        self.whiten = nn.Linear(FEATURE_DIM, FEATURE_DIM) if whitening else None

    def forward(self, x: Tensor) -> Tensor:
        """(n, 3, h, w) normalised images → (n, 2048) unit vectors."""
        out = l2_normalise(self.pool(self.features(x)))
        return out if self.whiten is None else l2_normalise(self.whiten(out))


def fold_batch_norm(network: RetrievalNet) -> RetrievalNet:
    """Copy a network in evaluation mode into one that computes the same, up to rounding, without batch norms."""
    folded = copy.deepcopy(network).eval()
    _fold(folded.features, "0", "1")
    for module in folded.modules():
        if isinstance(module, Bottleneck):
            for number in "123":
                _fold(module, f"conv{number}", f"bn{number}")
            if module.downsample is not None:
                _fold(module.downsample, "0", "1")
    return folded


def _fold(parent: nn.Module, convolution: str, norm: str) -> None:
    conv, bn = parent.get_submodule(convolution), parent.get_submodule(norm)
    if not isinstance(conv, nn.Conv2d) or not isinstance(bn, nn.BatchNorm2d):
        raise TypeError(f"{convolution} and {norm} are not a convolution and its batch norm")
    setattr(parent, convolution, fuse_conv_bn_eval(conv, bn))
    setattr(parent, norm, nn.Identity())
