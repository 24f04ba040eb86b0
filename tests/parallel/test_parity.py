"""Plans of `helpers.plans`, and random ones, against one process: the loss, every gradient, and steps of optimizers."""

import math
import os
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from torch import Tensor

from helpers.modern_vits import PARTS
from helpers.parity import parts_of, run_case, run_compiled, skip_what_cannot_run
from helpers.plans import ALL, BITFIT, Case, frozen, layerwise, lora, tiers
from helpers.ranks import Ranks
from vitpar import Execution, model_config, parallelize, parse, validate
from vitpar.check import CheckResult
from vitpar.errors import StrategyError
from vitpar.models.config import ModelConfig
from vitpar.recipe.sections.training import OptimizerSection
from vitpar.strategy.support import refuse_clashes
from vitpar.tasks.mae import MAE
from vitpar.training.optim.optimizer import ShardedOptimizer


@pytest.mark.each_row
@pytest.mark.parametrize("case", tiers())
def test_plan_matches_one_process(case: Case, ranks: Ranks) -> None:
    """All ranks must agree on the result, which covers gradients, updates, averages and the gradient norm."""
    skip_what_cannot_run(case.check.get("precision", "fp32"))
    results = ranks(case.ranks).run(run_case, case)
    assert all(result.passed for result in results), results[0].worst
    assert len({str(result) for result in results}) == 1, "ranks disagree about the result"
    recipe, config, _, _ = parts_of(case)
    trained = {f"{name}.{key}" for name, layer in config.layers.items() for key in layer.parameters}
    trained -= recipe.frozen(config)
    compared = {comparison.name for comparison in results[0].comparisons}
    updates = () if case.check.get("recipe_steps") == 0 else ("update", "average")
    assert {f"{what} {name}" for name in trained for what in ("gradient", "SGD update", *updates)} <= compared
    assert not updates or {"gradient norm of step 2", "clipped norm of step 2"} <= compared


@pytest.mark.slow
@pytest.mark.each_row
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("mesh", "precision"),
    [
        *(("tp2+ckpt", "fp32"), ("pp2", "bf16")),
        *(pytest.param(*row, marks=pytest.mark.soak) for row in (("fsdp2", "fp32"), ("tp2+ckpt", "fp8"))),
    ],
)
def test_compiled_blocks_match_one_process(mesh: str, precision: str, ranks: Ranks) -> None:
    """All blocks share one graph; a graph per block would exceed the compiler's recompile limit."""
    # More blocks than the compiler's recompile limit (8), after which it silently runs the function eagerly.
    skip_what_cannot_run(precision)
    check = {"compile_blocks": True, "precision": precision}
    case = Case(mesh, {"microbatches": 2}, {"depth": 10}, check)
    for result, graphs in ranks(case.ranks).run(run_compiled, case):
        assert result.passed, result.worst
        assert graphs == 1, "every block must run the same compiled graph"


def test_tables_have_enough_plans_and_ranks() -> None:
    assert len({(case.family, case.mesh, str(case.plan)) for case in ALL}) >= 130
    assert max(case.ranks for case in ALL) == 9
    assert set(PARTS) - {case.parts for case in ALL} <= {"gap", "dinov2", "siglip_gap"}


def trained_parts(device: torch.device, case: Case) -> tuple[set[str], set[str], int]:
    """Return parameters with a gradient and with a state, and the bytes of gradient messages; runs on every rank."""
    recipe, config, plan, _ = parts_of(case)
    execution = Execution(case.batch, frozen=recipe.frozen(config))
    model = parallelize(config, plan, execution, device)
    optimizer = ShardedOptimizer(model.named_parameters(), OptimizerSection())
    images = torch.randn(len(model.image_rows(case.batch)), 3, config.image_size, config.image_size)
    model.forward_backward(images, torch.zeros(case.batch, dtype=torch.int64), torch.arange(case.batch))
    with_gradient = {name for name, p in model.named_parameters() if p.grad is not None}
    optimizer.step(0.1)
    with_state = {name.split(".", 1)[1] for name in optimizer.state()}
    return with_gradient, with_state, sum(size for _, size in model.gradient_messages)


@pytest.mark.parametrize(
    "case", [frozen("embed, 0-1", "dp2"), lora("dp2", train="head, *.bias"), frozen(BITFIT, "fsdp2")], ids=str
)
def test_frozen_parameters_have_neither_gradient_nor_state_nor_message(case: Case, ranks: Ranks) -> None:
    recipe, config, _, _ = parts_of(case)
    shapes = {
        f"{name}.{key}": shape for name, layer in config.layers.items() for key, shape in layer.parameters.items()
    }
    trained = shapes.keys() - recipe.frozen(config)
    assert 0 < len(trained) < len(shapes)
    for with_gradient, with_state, sent in ranks(2).run(trained_parts, case):
        assert with_gradient == trained and with_state <= trained
        if case.mesh == "dp2":
            assert sent == 4 * sum(math.prod(shapes[name]) for name in trained)


def with_wrong_targets(device: torch.device, case: Case, mistake: str) -> CheckResult:
    """Check a masked autoencoder whose targets have other keys or images than its outputs; runs on every rank."""
    right = MAE.local_targets

    def wrong(self: MAE, images: Tensor, keys: Tensor, config: ModelConfig) -> Tensor:
        if mistake == "keys":
            return right(self, images, keys + 1, config)
        return right(self, images.roll(1, 0), keys, config)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MAE, "local_targets", wrong)
        return run_case(device, case)


@pytest.mark.parametrize(("mesh", "mistake"), [("tp2+sp", "keys"), ("pp2", "rows")])
def test_check_detects_targets_of_other_keys_or_rows(mesh: str, mistake: str, ranks: Ranks) -> None:
    case = Case(mesh, {"microbatches": 2} if mesh == "pp2" else {}, family="MAE")
    assert not ranks(2).run(with_wrong_targets, case, mistake)[0].passed


# drawn from the grammar

MODEL = {"depth": 4, "drop_path": 0.1, "layer_scale": 0.1, "qk_norm": True, "dropout": 0.1}
# 0: a few fixed examples; N > 0: N examples that differ in every run.
EXAMPLES = int(os.environ.get("VITPAR_RANDOM_PLANS", "0"))


def runs(case: Case) -> bool:
    """Return whether vitpar accepts the plan."""
    try:
        config = model_config("vit_nano_patch4_16", **case.model)
        refuse_clashes(validate(replace(parse(case.mesh), **case.plan), config, case.batch), "fp64", False)
    except StrategyError:
        return False
    return True


@pytest.mark.slow
@pytest.mark.timeout(0 if EXAMPLES else 900)
def test_random_plans_match_one_process(ranks: Ranks) -> None:
    checked: set[str] = set()

    @settings(
        max_examples=EXAMPLES or 3, derandomize=not EXAMPLES, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(layerwise((2, 4, 6, 8), (1, 2, 3)) if EXAMPLES else layerwise((4,), (2,)))
    def check(case: Case) -> None:
        case = replace(case, model=MODEL, batch=48, check={"precision": "fp64"})
        assume(runs(case))
        checked.add(str(case))
        results = ranks(case.ranks).run(run_case, case)
        assert all(result.passed for result in results), (str(case), results[0].worst)

    check()
    assert len(checked) >= 3, checked
