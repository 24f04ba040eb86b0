"""Models with imported weights, and their logits."""

from pathlib import Path

import torch
from torch import Tensor

from helpers.foreign_weights import SIZE
from vitpar.models.layers import LayeredModel
from vitpar.weights.folder import open_weights

IMAGES = torch.randn(3, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(9))


def model_of(folder: Path) -> LayeredModel:
    weights = open_weights(folder)
    model = LayeredModel(weights.config).eval()
    names = [name for name, _ in model.named_parameters()]
    model.load_state_dict({name: weights.read(name) for name in names})
    return model


def logits_of(folder: Path) -> Tensor:
    with torch.no_grad():
        return model_of(folder)(IMAGES)
