"""`check_plan`: correct plans pass, and every planted mistake in the training is detected, however small."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from helpers.parity import recipe_of
from helpers.ranks import Ranks
from vitpar import model_config, parse, validate
from vitpar.check import CheckResult, check_plan
from vitpar.check.compare import compare_numbers, kind, noise_of
from vitpar.models import IGNORED
from vitpar.models.loss import CrossEntropy
from vitpar.parallel import ParallelModel
from vitpar.sharded import local
from vitpar.tasks.classify import Classify

SIZES = {"num_classes": 10, "depth": 2, "drop_path": 0.2, "dropout": 0.1}


def run(
    device: torch.device, mesh: str, mistake: str = "", layer_scale: float | None = None, **settings: Any
) -> CheckResult:
    """Check a plan whose training has a planted mistake; runs on every rank."""
    config = model_config("vit_nano_patch4_16", **SIZES, layer_scale=layer_scale)
    plan = validate(replace(parse(mesh), microbatches=None), config, 16)
    with pytest.MonkeyPatch.context() as patch:
        make(patch, mistake)
        return check_plan(recipe_of(16, **settings), config, plan, device)


def make(patch: pytest.MonkeyPatch, mistake: str) -> None:
    """Plant a mistake in the training under the plan. The reference in one process stays correct."""
    real = ParallelModel.forward_backward

    def scaled(part: str, factor: float) -> None:
        def spoilt(self: ParallelModel, *args: Any) -> Any:
            loss = real(self, *args)
            for name, p in self.named_parameters():
                if part in name:
                    local(p.grad).mul_(factor)
            return loss

        patch.setattr(ParallelModel, "forward_backward", spoilt)

    def given(change: Callable[..., Any]) -> None:
        patch.setattr(ParallelModel, "forward_backward", lambda self, x, y, k: real(self, *change(x, y, k)))

    match mistake:
        case "a frozen parameter moves":

            def moved(self: ParallelModel, *args: Any) -> Any:
                for name, p in self.named_parameters():
                    if name == "blocks.0.norm1.bias":
                        local(p.detach()).add_(1e-7)
                return real(self, *args)

            patch.setattr(ParallelModel, "forward_backward", moved)
        case "one weight x 1.01" | "one weight x 1.1":
            scaled("blocks.1.attn.qkv.weight", float(mistake.split()[-1]))
        case "all gradients / 1.01":
            scaled("", 1 / 1.01)
        case "keys of neighbours":
            given(lambda x, y, k: (x, y, k.roll(1)))
        case "no smoothing":
            patch.setattr(Classify, "loss", CrossEntropy())
        case "labels of mixed images swapped":
            given(lambda x, y, k: (x, y if y.ndim == 1 else y[:, [1, 0, 2]], k))
        case "replicas count twice in the norm":
            from vitpar.training import step

            total = step.total_norms
            patch.setattr(step, "total_norms", lambda *a, **k: total(*a, **k) * 2**0.5)
        case "clipped to 1.2 times the limit":
            from vitpar.training.optim.norms import clip_

            patch.setattr(
                "vitpar.training.step.clip_", lambda given, norm, limit, scale: clip_(given, norm, 1.2 * limit, scale)
            )
        case "average decays too fast":
            from vitpar.training.optim.average import EMA

            init = EMA.__init__
            patch.setattr(EMA, "__init__", lambda self, model, decay, *a: init(self, model, decay - 0.01, *a))
        case "no weight decay":
            patch.setattr("vitpar.training.optim.optimizer.decays", lambda name: False)
        case "wrong rate":
            from vitpar.training.optim.optimizer import ShardedOptimizer

            move = ShardedOptimizer.step
            patch.setattr(ShardedOptimizer, "step", lambda self, lr: move(self, lr * 1.01))
        case "a repeat left out":
            from vitpar.tasks.image_input import ImageInput

            take = ImageInput.train_step

            def without(self: ImageInput, batch: Any) -> Any:
                images = None if batch.images is None else batch.images.roll(1, 0)
                return take(self, replace(batch, images=images))

            patch.setattr(ImageInput, "train_step", without)
        case "none, and small messages":
            patch.setattr("vitpar.check.compare.TOGETHER", 2_000)
        case _:
            assert not mistake


@pytest.mark.parametrize(
    ("mistake", "mesh", "settings"),
    [
        ("one weight x 1.01", "fsdp2", {"layer_scale": 1e-6}),
        ("one weight x 1.1", "fsdp2", {"precision": "bf16"}),
        ("all gradients / 1.01", "fsdp2", {"precision": "bf16"}),
        ("keys of neighbours", "dp2", {"precision": "bf16"}),
        ("no smoothing", "dp2", {"precision": "bf16"}),
        ("labels of mixed images swapped", "dp2", {}),
        ("replicas count twice in the norm", "dp2", {}),
        ("clipped to 1.2 times the limit", "pp2", {"train__clip_grad_norm": 0.1}),
        ("average decays too fast", "fsdp2", {}),
        ("no weight decay", "dp2", {}),
        ("wrong rate", "dp2", {}),
        ("a repeat left out", "dp2", {}),
    ],
    ids=str,
)
def test_planted_mistake_is_detected(mistake: str, mesh: str, settings: dict[str, Any], ranks: Ranks) -> None:
    """Each mistake affects only the training under the plan.

    In fp32, even an error of 1 % in one weight's gradient must fail.
    """
    for result in ranks(2).run(run, mesh, mistake, **settings):
        assert not result.passed, result.worst


@pytest.mark.slow
def test_size_of_messages_does_not_change_the_result(ranks: Ranks) -> None:
    usual, small = (ranks(2).run(run, "fsdp2", mistake) for mistake in ("", "none, and small messages"))
    assert usual == small and usual[0].passed


def test_model_with_dropout_refuses_a_step_without_keys(ranks: Ranks) -> None:
    for said in ranks(1).run(without_keys):
        assert said.startswith("vit_nano_patch4_16 has drop-path or dropout") and "pass keys" in said


def without_keys(device: torch.device) -> str:
    from vitpar import Execution, parallelize
    from vitpar.errors import ModelError

    config = model_config("vit_nano_patch4_16", **SIZES)
    model = parallelize(config, validate(parse("dp1"), config, 4), Execution(4), device)
    with pytest.raises(ModelError) as refused:
        model.forward_backward(torch.zeros(4, 3, 16, 16), torch.full((4,), IGNORED))
    return str(refused.value)


def test_noise_is_pooled_over_blocks_per_kind_of_tensor() -> None:
    assert kind("blocks.11.attn.qkv.weight") == kind("blocks.0.attn.qkv.weight") != kind("head.fc.weight")
    whole = {"blocks.0.x": torch.tensor([3.0, 4.0]), "blocks.1.x": torch.tensor([6.0, 8.0])}
    other = {"blocks.0.x": torch.tensor([3.0, 4.4]), "blocks.1.x": torch.tensor([6.0, 8.0])}
    largest, l2, scale = noise_of(whole, [other])["blocks.*.x"]
    assert largest == pytest.approx(0.1 / 2**0.5) and l2 == pytest.approx(0.08 / 2**0.5)
    assert scale == pytest.approx(0.4 * 4 / 25 / 2**0.5)


def test_nan_counts_as_an_infinite_error() -> None:
    settings: dict[str, Any] = {"least": 1e-4, "tolerance": None}
    (found,) = compare_numbers({"loss": float("nan")}, {"loss": 1.0}, [{"loss": 1.0}], **settings)
    assert found.severity == float("inf")


def test_frozen_layers_are_checked(ranks: Ranks) -> None:
    """Gradients and updates of the other layers are compared, and frozen parameters must not change at all."""
    mesh, settings = "pp2xfsdp2", {"train__freeze": "embed, 0, *.norm2.*", "train__precision": "fp64"}
    result = ranks(4).run(run, mesh, **settings)[0]
    assert result.passed, result.worst
    names = {comparison.name for comparison in result.comparisons}
    assert "gradient blocks.1.norm1.bias" in names and "gradient blocks.0.norm1.bias" not in names
    assert "gradient blocks.1.norm2.bias" not in names
    wrong = ranks(4).run(run, mesh, "one weight x 1.01", **settings)[0]
    assert "blocks.1.attn.qkv.weight" in wrong.worst.name and not wrong.passed
    wrong = ranks(4).run(run, mesh, "a frozen parameter moves", **settings)[0]
    assert wrong.worst.name == "changed elements of frozen parameters" and not wrong.passed


@pytest.mark.parametrize("fc_norm", [False, True])
def test_layer_decay_is_checked_for_both_places_of_the_last_norm(fc_norm: bool, ranks: Ranks) -> None:
    """timm counts a norm after the mean among the layers of the classifier, and one before among the blocks."""
    result = ranks(1).run(run_pooled, fc_norm)[0]
    assert result.passed, result.worst


def run_pooled(device: torch.device, fc_norm: bool) -> CheckResult:
    config = model_config("vit_nano_patch4_16", **SIZES, pool="avg", fc_norm=fc_norm)
    recipe = recipe_of(4, optimizer__layer_decay=0.5)
    return check_plan(recipe, config, validate(parse("dp1"), config, 4), device)
