"""Models with imported weights, their logits, and their comparison with the library that the weights come from."""

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from helpers.foreign_weights import SIZE, saved
from vitpar.models.layers import LayeredModel
from vitpar.weights.folder import open_weights
from vitpar.weights.importing import import_weights

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


def assert_same_function(
    ours: nn.Module, theirs: nn.Module, images: Tensor, folder: Path, config: dict[str, Any] | None
) -> None:
    """Compare logits and every parameter's gradient in float64.

    Gradients of the other model are imported as if they were weights, with its config.json.
    """
    logits, output = ours(images), theirs(images)
    expected = getattr(output, "logits", output)
    torch.testing.assert_close(logits, expected, atol=1e-10, rtol=1e-10)
    for computed in (logits, expected):
        F.cross_entropy(computed, torch.arange(len(images)) % logits.shape[-1]).backward()
    gradients = {}
    for name, p in theirs.named_parameters():
        # vitpar has one bias where timm's parallel blocks add two with equal gradients.
        unused = p.grad is None or name.endswith("mlp_out_proj.bias")
        gradients[name] = torch.zeros_like(p).float() if unused else p.grad.float()
    import_weights(saved(folder / "gradients", gradients, config), folder / "imported gradients")
    others, compared = open_weights(folder / "imported gradients"), 0
    for name, parameter in ours.named_parameters():
        found = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        compared += parameter.grad is not None
        error = (found.float() - others.read(name)).abs().max().item()
        assert error <= 1e-6 * max(1e-3, found.abs().max().item()), name  # the saved ones are rounded to float32
    assert compared > 20
