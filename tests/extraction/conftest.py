"""Small networks in the published layout."""

import io

import pytest
import torch

from lattqe.extraction.resnet import RetrievalNet

META = {
    "architecture": "resnet50",
    "local_whitening": False,
    "pooling": "gem",
    "regional": False,
    "whitening": True,
    "mean": [0.485, 0.456, 0.406],
    "std": [0.229, 0.224, 0.225],
    "outputdim": 2048,
}


@pytest.fixture(scope="session")
def network():
    """A ResNet-50 with GeM and whitening; random weights, lively batch statistics."""
    torch.manual_seed(0)
    network = RetrievalNet("resnet50").eval()
    for module in network.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.1)
            module.running_var.uniform_(0.5, 1.5)
    torch.nn.init.constant_(network.pool.p, 2.9)
    return network


@pytest.fixture(scope="session")
def hollow(network):
    """The same keys and shapes, all views of the same zeros, which a file holds once: for files that are never run.

    A third of all the numbers: tensors that expand to more than four times their file are refused.
    """
    shapes = {key: value.shape for key, value in network.state_dict().items()}
    zeros = torch.zeros(sum(shape.numel() for shape in shapes.values()) // 3, dtype=torch.float16)
    return {key: zeros[: shape.numel()].view(shape) for key, shape in shapes.items()}


@pytest.fixture(scope="session")
def published(network):
    """Bytes of a network file, as cnnimageretrieval-pytorch saves it: published(state=..., **changes of meta)."""

    def save(state=None, legacy=False, **changes):
        file = io.BytesIO()
        content = {"meta": {**META, **changes}, "state_dict": state if state is not None else network.state_dict()}
        torch.save(content, file, _use_new_zipfile_serialization=not legacy)
        return file.getvalue()

    return save
