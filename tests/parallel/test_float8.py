"""Float8 matmul: its rounding, the parts that stay exact, and the cases it refuses."""

from typing import Any

import pytest
import torch

from helpers.parity import skip_what_cannot_run
from helpers.ranks import Ranks
from vitpar import model_config, parse, validate
from vitpar.errors import PlannerError, RecipeError
from vitpar.models.compiled import is_whole
from vitpar.models.vit.layers import Block
from vitpar.parallel import Execution, float8, linear, parallelize
from vitpar.parallel.precision import resolve_precision, slow_here
from vitpar.planner.profile.cluster import find_cluster
from vitpar.planner.profile.estimate import estimate_model
from vitpar.strategy.execution import FastAccum, multiplies_in_float8

CPU = torch.device("cpu")
CONFIG = model_config("vit_nano_patch4_16", num_classes=10)


@pytest.fixture(autouse=True)
def float8_products() -> None:
    skip_what_cannot_run("fp8")


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16()


def far(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Return the relative error in the Frobenius norm."""
    return ((found.float() - exact.float()).norm() / exact.float().norm()).item()


def test_rows_are_scaled_by_powers_of_two_into_the_float8_range() -> None:
    x = random(6, 32) * torch.tensor([1e-30, 1e-3, 1, 7, 1e4, 1e30]).bfloat16()[:, None]
    rows, scales = float8.scaled_rows(x)
    assert scales.dtype is torch.float32 and torch.equal(scales.log2(), scales.log2().round())
    most = rows.float().abs().amax(dim=-1)
    assert ((most > float8.LARGEST / 2) & (most <= float8.LARGEST)).all()
    within = (rows.float() * scales - x.float()).abs() <= x.float().abs() / 16 + scales * 2**-10
    assert within.all(), "three bits behind the point, and the smallest steps of the type"


def test_zero_rows_stay_zero_and_nan_stays_nan() -> None:
    x = torch.zeros(3, 16)
    x[1, 2], x[2, 3] = torch.nan, torch.inf
    y = float8.product(x.bfloat16(), torch.eye(16).bfloat16(), fast=True)
    assert (y[0] == 0).all() and y[1].isnan().any() and not y[2].isfinite().all()


def test_products_and_gradients_have_float8_accuracy() -> None:
    x, weight, bias = (random(*shape).requires_grad_() for shape in ((2, 5, 64), (48, 64), (48,)))
    y = linear.float8_linear(x, weight, bias)
    gradient = random(2, 5, 48)
    y.backward(gradient)
    assert y.dtype is torch.bfloat16 and far(y, torch.nn.functional.linear(x, weight, bias)) < 0.05
    assert far(x.grad, gradient @ weight) < 0.05
    exact = gradient.flatten(0, -2).mT @ x.detach().flatten(0, -2)
    assert torch.equal(weight.grad, exact), "gradients of weights are computed in bf16"


def test_token_result_does_not_depend_on_other_tokens() -> None:
    x, weight = random(7, 64), random(32, 64)
    x[5] *= 1000
    whole = float8.product(x, weight, fast=True)
    assert torch.equal(whole[:3], float8.product(x[:3], weight, fast=True))
    assert torch.equal(whole[:, :16], float8.product(x, weight[:16], fast=True)), "nor an output feature"


def layers_in_float8(device: torch.device = CPU, mesh: str = "dp1", **settings: Any) -> dict[str, float8.Fast]:
    """Return how the layers of a stage multiply in float8, by the names of those that do; runs on every rank."""
    plan = validate(parse(mesh), CONFIG, 4)
    model = parallelize(CONFIG, plan, Execution(4, precision="fp8", **settings), device)
    (stage,) = model.stages.values()
    return {name: module.float8 for name, module in stage.named_modules() if hasattr(module, "float8")}


def test_only_large_linear_layers_of_blocks_use_float8(alone: None) -> None:
    layers, width = {"qkv", "proj", "fc1", "fc2"}, CONFIG.embed_dim
    blocks = {f"blocks.{i}" for i in range(CONFIG.depth)}
    found = layers_in_float8(fp8_min_features=0)
    assert {tuple(name.rsplit(".", 2)) for name in found} == {
        (block, {"q": "attn", "p": "attn", "f": "mlp"}[layer[0]], layer) for block in blocks for layer in layers
    }
    assert {name.rpartition(".")[2] for name in layers_in_float8(fp8_min_features=width + 1)} == layers - {"proj"}
    assert set(found.values()) == {float8.Fast(output=True, gradient=False)}
    always = layers_in_float8(fp8_min_features=0, fp8_fast_accum="always")
    assert set(always.values()) == {float8.Fast(output=True, gradient=True)}
    assert resolve_precision("fp8").compute is torch.bfloat16 and resolve_precision("fp8").parameters is torch.float32


@pytest.mark.parametrize(("more", "layers"), [(0, 4), (1, 3)])
def test_splitting_a_layer_does_not_change_whether_it_uses_float8(more: int, layers: int, ranks: Ranks) -> None:
    for found in ranks(2).run(layers_in_float8, "tp2", fp8_min_features=CONFIG.embed_dim + more):
        assert len(found) == CONFIG.depth * layers


def test_size_of_a_layer_is_the_harmonic_mean_of_its_sides() -> None:
    assert multiplies_in_float8(768, 768, 768) and not multiplies_in_float8(768, 768, 769)
    assert multiplies_in_float8(384, 1536, 614) and not multiplies_in_float8(384, 1536, 615)


def test_model_without_large_layers_is_refused(alone: None) -> None:
    with pytest.raises(
        RecipeError, match=r"blocks of vit_nano_patch4_16 reaches train\.fp8_min_features 576: use bf16"
    ):
        layers_in_float8()


@pytest.mark.parametrize("setting", list(float8.FAST))
def test_products_accumulate_as_asked(setting: FastAccum, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    multiply = torch._scaled_mm

    def recorded(*operands: torch.Tensor, use_fast_accum: bool, **options: Any) -> torch.Tensor:
        asked.append(use_fast_accum)
        return multiply(*operands, **options)

    monkeypatch.setattr(torch, "_scaled_mm", recorded)
    x, weight = random(4, 32).requires_grad_(), random(16, 32).requires_grad_()
    linear.float8_linear(x, weight, fast=float8.FAST[setting]).sum().backward()
    assert asked == {"forward": [True, False], "always": [True, True], "never": [False, False]}[setting]


def test_weight_shapes_unsupported_by_gpus_are_refused() -> None:
    block = Block(model_config("vit_nano_patch4_16", embed_dim=24, num_heads=4, mlp_hidden_dim=48), 3)
    with pytest.raises(RecipeError, match=r"blocks\.3\.attn\.qkv has 72 x 24: use bf16, or a plan that splits it less"):
        linear.compute_in_float8("blocks.3", block, 0)
    whole = Block(model_config("vit_nano_patch4_16"), 3)
    linear.compute_in_float8("blocks.3", whole, 0)
    assert is_whole(whole.attn.qkv), "the kernel that packs queries, keys and values computes it too"


def test_device_without_float8_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("only supported on compute capability >= 8.9\nand more")

    assert float8.float8_fault(CPU) is None
    monkeypatch.setattr(torch, "_scaled_mm", fail)
    with pytest.raises(RecipeError, match=r"fp8, but this cpu device cannot .*\(only supported on .* 8\.9\): use bf16"):
        parallelize(CONFIG, validate(parse("dp1"), CONFIG, 4), Execution(4, precision="fp8"), CPU)


def test_slow_cpus_and_gpus_without_float8_rates_are_reported() -> None:
    assert slow_here("fp8", CPU) == "this CPU has no fp8 instructions: steps take far longer than in fp32"
    with pytest.raises(PlannerError, match="8xA100 has no rate of float8 matrix products: plan for bf16"):
        estimate_model(CONFIG, "fp8", find_cluster("8xA100").hardware(), ("tp1",))
