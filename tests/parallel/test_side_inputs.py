"""Side inputs reach the layers that take them: gradients equal those of the model in one process, under every plan."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import vitpar
from helpers.plans import ZBV
from helpers.ranks import Ranks
from helpers.shared_models import Classes, Hidden, Patches
from vitpar import parse, validate
from vitpar.errors import ModelError
from vitpar.models.description import SideInput
from vitpar.models.initial import initialise
from vitpar.models.layers import LayeredModel
from vitpar.parallel import parallelize
from vitpar.sharded import to_local
from vitpar.strategy import Execution

BATCH = 8


@dataclass(frozen=True)
class Captioned(vitpar.OwnModel):
    """Images with words, which a block in the middle appends to the tokens, and a mask that the head reads."""

    image_size: int = 8
    num_classes: int = 8
    depth: int = 4

    @property
    def side_inputs(self) -> Mapping[str, SideInput]:
        return {"ids": SideInput((12,)), "mask": SideInput((24,), "bool")}

    def build_layer(self, name: str) -> vitpar.Layer:
        if name == "embed":
            return Patches(16, 24)
        return Masked(8, 24) if name == "head" else Words() if name == "blocks.2" else Hidden(24, 32)


class Words(vitpar.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Parameter(torch.empty(5, 24))

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        """x: [batch, 12, 24], ids: [batch, 12] -> [batch, 24, 24]."""
        return torch.cat((x, F.embedding(ids, to_local(self.words))), 1)


class Masked(Classes):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """x: [batch, 24, 24], mask: [batch, 24] -> [batch, classes]."""
        read = (x.tanh() * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        return self.fc(self.pooled(read))


def drawn() -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return images, labels and side inputs."""
    draws = torch.Generator().manual_seed(0)
    images = torch.randn(BATCH, 3, 8, 8, generator=draws, dtype=torch.float64)
    mask = torch.rand(BATCH, 24, generator=draws) < 0.7
    ids = torch.randint(0, 5, (BATCH, 12), generator=draws)
    return images, torch.arange(BATCH) % 8, {"ids": ids, "mask": mask}


def gradients(device: torch.device, mesh: str, more: dict[str, Any]) -> tuple[float, dict[str, Tensor], bool]:
    """Return loss, complete gradients, and whether `predict` equals the plain model; runs on every rank."""
    config, (images, labels, sides) = Captioned(), drawn()
    plan = validate(replace(parse(mesh), **more), config, BATCH)
    model = parallelize(config, plan, Execution(BATCH, "fp64"), device)
    rows = images[model.image_rows(BATCH)] if model.takes_images else None
    part = model.forward_backward(rows, labels, **sides)
    found = {}
    for name, p in model.named_parameters():
        assert p.grad is not None, name
        found[name] = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
    logits = model.predict(rows, BATCH, **sides)
    right = logits is None or torch.allclose(logits, plain()(images, **sides)[model.output_rows(BATCH)])
    return model.global_loss(part).item(), found, right


def plain() -> LayeredModel:
    """Return the model in one process, with its initial values in float64."""
    model = LayeredModel(Captioned()).double()
    initialise(model, 0, Captioned())
    return model


@pytest.mark.parametrize(
    ("mesh", "more"),
    [
        ("dp1", {"microbatches": 2}),
        ("tp2xdp2", {}),
        ("pp2", ZBV),
        ("pp2: 0-1=tp2, 2=dp2+ckpt, *=tp2+sp", {"microbatches": 2}),
    ],
)
def test_gradients_equal_one_process(mesh: str, more: dict[str, Any], ranks: Ranks) -> None:
    model, (images, labels, sides) = plain(), drawn()
    loss = F.cross_entropy(model(images, **sides), labels)
    loss.backward()
    seen = set()
    for found, gradient, right in ranks(parse(mesh).world_size).run(gradients, mesh, more):
        assert right and found == pytest.approx(loss.item(), abs=1e-12)
        for name, value in gradient.items():
            torch.testing.assert_close(value, model.get_parameter(name).grad, atol=1e-12, rtol=1e-9)
            seen.add(name)
    assert seen == {name for name, _ in model.named_parameters()}


def test_missing_side_inputs_are_refused(alone: None) -> None:
    model = parallelize(Captioned(), validate(parse("dp1"), Captioned(), BATCH), Execution(BATCH), "cpu")
    with pytest.raises(
        ModelError, match=r"own takes ids besides its input: pass each by its name, \[batch, …\] for all"
    ):
        model.predict(torch.zeros(BATCH, 3, 8, 8), BATCH, mask=torch.ones(BATCH, 24, dtype=torch.bool))
