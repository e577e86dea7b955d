"""A small encoder for tests, and its hook for `--encoder tiny_encoder:make`."""

import os
import time

import torch
from torch import nn


class TinyEncoder(nn.Module):
    """Means of 16 random filters' responses: takes any size, and tells images apart."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weight = nn.Parameter(torch.randn(16, 3, 3, 3, generator=generator))

    def forward(self, x):
        return torch.relu(torch.conv2d(x, self.weight, stride=2, padding=1)).mean(dim=(2, 3)) - 0.5


def make(device):
    """The hook."""
    encoder = TinyEncoder().eval().to(device)
    encoder.mean, encoder.std = (0.5, 0.5, 0.5), (0.25, 0.25, 0.25)
    return encoder


def make_number(device):
    """A hook that gives nothing to call."""
    return 7


def make_wrong_shape(device):
    """A hook whose encoder gives no rows."""
    return lambda x: x.mean()


def make_logging(device):
    """A slow encoder that notes every image it sees in the file LATTQE_TEST_LOG, where that is set."""
    encoder = make(device)

    def call(x):
        if "LATTQE_TEST_LOG" in os.environ:
            time.sleep(0.01)
            with open(os.environ["LATTQE_TEST_LOG"], "a") as log:
                log.write("image\n")
        return encoder(x)

    call.mean, call.std = encoder.mean, encoder.std
    return call
