"""BERT and T5 under plans: loss, gradients and predictions equal those of one process with shared tensors."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from helpers.plans import DUALPIPEV, INTERLEAVED, ZBV
from helpers.ranks import RankPool
from helpers.text_models import PADDED, V1_1, TextModel, bert, sample, t5, token_loss
from vitpar import parse, validate
from vitpar.errors import ModelError, StrategyError
from vitpar.models.initial import initialise
from vitpar.models.layers import LayeredModel
from vitpar.parallel import parallelize
from vitpar.strategy import Execution

BATCH = 8
MODELS: dict[str, TextModel] = {
    "bert": bert(depth=4, dropout=0.2),
    "t5": t5(dropout=0.2),
    "t5 v1.1": t5(**V1_1, depth=1, decoder_depth=3),
}
KEYS = torch.arange(1, BATCH + 1) * 1_000_003
CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("bert", "dp1", {"microbatches": 2}),
    ("bert", "tp2", {}),
    ("bert", "tp2xdp2+sp", {}),
    ("bert", "fsdp2", {}),
    ("bert", "dp2+zero2", {"microbatches": 2}),
    ("bert", "pp2", {"microbatches": 4}),
    ("bert", "pp2xtp2+sp", {"microbatches": 2}),
    ("bert", "pp2", ZBV),
    ("bert", "pp1: embed=fsdp2, 0=tp2, 1=tp2+sp+ckpt, 2=dp2, *=fsdp2", {}),
    ("t5", "tp2", {}),
    ("t5", "tp2xfsdp2+sp", {}),
    ("t5", "dp2+zero1", {}),
    ("t5", "pp2xfsdp2", {"microbatches": 2}),
    ("t5", "pp2", ZBV),
    ("t5", "pp2", INTERLEAVED),
    ("t5", "pp1: embed=fsdp2, 0=tp2, 1=dp2, 2=fsdp2, 3=tp2+sp, 4=tp2+ckpt, *=fsdp2", {}),
    ("t5 v1.1", "tp2+sp", {}),
    ("t5 v1.1", "fsdp2", {}),
    ("t5 v1.1", "pp2xtp2", DUALPIPEV),
]
IDS = [f"{name}-{mesh.replace(' ', '')}-{plan.get('schedule', '')}" for name, mesh, plan in CASES]


@dataclass(frozen=True)
class TokenLoss:
    """Mean cross-entropy of the tokens whose target is not `PADDED`."""

    def count(self, targets: Tensor, batch: int) -> Tensor:
        return (targets != PADDED).sum()

    def total(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs.flatten(0, 1), targets.flatten(), ignore_index=PADDED, reduction="sum")

    def measure(self, outputs: Tensor, targets: Tensor) -> None:
        return None


def gradients(
    device: torch.device, name: str, mesh: str, more: dict[str, Any], precision: str = "fp64"
) -> tuple[float, dict[str, Tensor], bool]:
    """Return loss, complete gradients, and whether `predict` equals the plain model; runs on every rank."""
    config = MODELS[name]
    x, sides, targets = sample(config, BATCH)
    plan = validate(replace(parse(mesh), **more), config, BATCH)
    model = parallelize(config, plan, Execution(BATCH, precision), device, TokenLoss())
    rows = x[model.image_rows(BATCH)] if model.takes_images else None
    part = model.forward_backward(rows, targets, KEYS if config.stochastic else None, **sides)
    found = {}
    for parameter_name, p in model.named_parameters():
        assert p.grad is not None, parameter_name
        found[parameter_name] = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
    logits, right = model.predict(rows, BATCH, **sides), True
    if logits is not None and precision == "fp64":
        right = torch.allclose(logits, plain(config).eval()(x, **sides)[model.output_rows(BATCH)])
    return model.global_loss(part).item(), found, right


def plain(config: TextModel) -> LayeredModel:
    """Return the model in one process, with its initial values in float64 and shared tensors."""
    model = LayeredModel(config).double()
    model.tie()
    initialise(model, 0, config)
    return model


@pytest.mark.parametrize(("name", "mesh", "more"), CASES, ids=IDS)
def test_gradients_equal_one_process(
    name: str, mesh: str, more: dict[str, Any], ranks: Callable[[int], RankPool]
) -> None:
    config = MODELS[name]
    model, (x, sides, targets) = plain(config), sample(config, BATCH)
    loss = token_loss(model(x, KEYS if config.stochastic else None, **sides), targets)
    loss.backward()
    seen = set()
    for found, gradient, right in ranks(parse(mesh).world_size).run(gradients, name, mesh, more):
        assert right and found == pytest.approx(loss.item(), abs=1e-12)
        for parameter_name, value in gradient.items():
            expected = model.get_parameter(config.owner(parameter_name)).grad
            assert expected is not None
            error = (value - expected).abs().max().item() / expected.abs().max().item()
            assert error < 1e-11, parameter_name
            seen.add(parameter_name)
    assert seen == {f"{layer.name}.{key}" for layer in config.layers.values() for key in layer.parameters}


@pytest.mark.parametrize(("name", "mesh"), [("bert", "tp2+sp"), ("bert", "fsdp2"), ("t5 v1.1", "dp2")])
def test_gradients_in_16_bits_are_those_of_one_process_up_to_rounding(
    name: str, mesh: str, ranks: Callable[[int], RankPool]
) -> None:
    config = MODELS[name]
    model, (x, sides, targets) = plain(config), sample(config, BATCH)
    token_loss(model(x, KEYS if config.stochastic else None, **sides), targets).backward()
    for _, gradient, _ in ranks(2).run(gradients, name, mesh, {}, "bf16"):
        for parameter_name, value in gradient.items():
            expected = model.get_parameter(config.owner(parameter_name)).grad
            assert expected is not None
            assert ((value - expected).norm() / expected.norm()).item() < 0.1, parameter_name


def test_masks_may_be_left_out_but_not_the_decoders_ids(alone: None) -> None:
    for config in (bert(), t5()):
        model = parallelize(config, validate(parse("dp1"), config, BATCH), Execution(BATCH, "fp64"), "cpu", TokenLoss())
        x, sides, _ = sample(config, BATCH)
        needed = {name: side for name, side in sides.items() if name == "decoder_input_ids"}
        logits = model.predict(x, BATCH, **needed)
        assert logits is not None and torch.allclose(logits, plain(config).eval()(x, **needed))
    with pytest.raises(ModelError, match="t5_custom takes decoder_input_ids besides its input: pass each by its name"):
        model.predict(x, BATCH, attention_mask=sides["attention_mask"])


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        (
            "tp4+2d",
            "cannot split the layers 'block' of bert_custom, whose parts only tp and \\+sp can split: leave \\+2d out",
        ),
        ("tp8", "tp8 does not divide the 4 heads of bert_custom: use tp2 or tp4"),
        ("pp1: embed=fsdp2, *=dp2", "embed and head share embed.word_embeddings.weight, but their strategies are"),
    ],
)
def test_plans_that_do_not_fit_are_refused(mesh: str, message: str) -> None:
    with pytest.raises(StrategyError, match=message):
        validate(parse(mesh), bert(), BATCH)
