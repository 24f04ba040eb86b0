"""Distillation from a teacher: student's and teacher's plans against one process."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.parity import check
from helpers.ranks import RankPool
from helpers.written_weights import weights_of
from vitpar import model_config, parse, validate
from vitpar.check import CheckResult
from vitpar.models import ModelConfig
from vitpar.models.initial import initialise
from vitpar.models.layers import LayeredModel

CLASSES = 7
IMAGES = {"data.mean": (0.1, 0.2, 0.3), "data.std": (0.4, 0.5, 0.6)}
"""What `written_weights` says of the teacher's images."""
SMALL = {"model.embed_dim": 24, "model.num_heads": 4, "model.depth": 4}
TEACHERS = {
    "vit": model_config("vit_nano_patch4_16", depth=2, embed_dim=16, num_heads=4, num_classes=CLASSES, pool="avg"),
    "swin": model_config("swin_nano_patch2_window4_32", image_size=16, num_classes=CLASSES, drop_path=0.5),
}


@pytest.fixture(scope="module", params=["vit"])
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(TEACHERS["vit"], tmp_path_factory.mktemp("teachers") / "vit")


def written(config: ModelConfig, folder: Path) -> Path:
    """Write weights of a teacher whose logits differ, so that its classes are clear."""
    model = LayeredModel(config)
    initialise(model, 5, config.perturbed)
    for name, parameter in model.named_parameters():
        if name.startswith("head.fc"):
            parameter.data.mul_(30)
    weights_of(model, config, folder)
    return folder


def run_check(device: torch.device, teacher: Path, mesh: str, settings: dict[str, Any]) -> CheckResult:
    settings = {"train.batch_size": 16, **settings}
    from vitpar.check import check_plan, recipe_to_check

    recipe = recipe_to_check({**SMALL, **IMAGES, "distill.teacher": str(teacher), "parallel.mesh": mesh, **settings})
    config = recipe.config(CLASSES)
    return check_plan(recipe, config, recipe.plan(config), device)


DISTILLED = {"model.distillation": True}
SOFT = {"distill.kind": "soft", "distill.tau": 2.5, "distill.alpha": 0.3}
STEPS = {"parallel.schedule": "interleaved1f1b", "parallel.virtual_stages": 2, "parallel.microbatches": 2}


@pytest.mark.parametrize(
    ("mesh", "plan", "settings"),
    [
        ("dp2", "dp", DISTILLED),
        ("fsdp2", "fsdp", DISTILLED | SOFT),
        ("tp2+sp", "tp2", DISTILLED | SOFT),
        ("pp2", "tp", {**DISTILLED, **SOFT, **STEPS}),
        ("tp2", "dp2", {"distill.kind": "logits", "distill.tau": 3.0, "task.options": {"bce": True}}),
        ("pp2", "fsdp2", {"distill.kind": "logits", "model.name": "swin_nano_patch2_window4_32"}),
        ("pp2xtp2", "dp", DISTILLED),
        ("pp2xtp2", "tp2xfsdp2+sp", DISTILLED | SOFT | {"parallel.microbatches": 4}),
        ("dp2xfsdp2", "tp4", DISTILLED | SOFT),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("precision", ["fp64"])
def test_plans_of_student_and_teacher_change_nothing(
    mesh: str, plan: str, settings: dict[str, Any], precision: str, teacher: Path, ranks: Callable[[int], RankPool]
) -> None:
    world = parse(mesh).world_size
    settings = {"train.precision": precision, "distill.plan": plan, **settings}
    for result in ranks(world).run(run_check, teacher, mesh, settings):
        print(result.worst)
        assert result.passed, result.worst
