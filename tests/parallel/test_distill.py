"""Distillation: its loss against DeiT's, plans of student and teacher against one process, and classes by name."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from helpers.foreign_models import randomised, timm_logits
from helpers.foreign_weights import CLASSES, HEADS, PATCH, SIZE, TIMM_CONFIG, WIDTH, saved, timm_state
from helpers.imported import IMAGES, model_of
from helpers.oracles import timm
from helpers.ranks import RankError, Ranks
from helpers.written_weights import weights_of
from vitpar import model_config, parse, validate
from vitpar.check import CheckResult, check_plan, recipe_to_check
from vitpar.models import IGNORED
from vitpar.models.layers import LayeredModel
from vitpar.planner.cost.records import PlannedTeacher
from vitpar.recipe import Recipe
from vitpar.recipe.sections.training import DistillSection
from vitpar.sharded import local
from vitpar.tasks import task_of
from vitpar.tasks.distill import Distill
from vitpar.tasks.task import LabelSet
from vitpar.training.build import TRAINING_DATA, build
from vitpar.weights.folder import open_weights
from vitpar.weights.importing import import_weights

BATCH = 16


@dataclass(frozen=True)
class Batch:
    """Input of a step over all ranks."""

    images: Tensor
    first: Tensor
    other: Tensor
    weight: Tensor

    @property
    def labels(self) -> Tensor:
        """Labels as `ImageInput` gives them: of mixed images with the partner's label and the weight."""
        mixed = torch.stack([self.first.double(), self.other.double(), self.weight], 1)
        return self.first if bool((self.weight == 1).all()) else mixed


def batch(mixed: bool) -> Batch:
    draws = torch.Generator().manual_seed(3)
    return Batch(
        torch.randn(BATCH, 3, SIZE, SIZE, generator=draws, dtype=torch.float64),
        *torch.randint(0, CLASSES, (2, BATCH), generator=draws),
        torch.rand(BATCH, generator=draws, dtype=torch.float64) if mixed else torch.ones(BATCH).double(),
    )


OPTIONS: dict[str, dict[str, Any]] = {
    "hard": {"kind": "hard", "alpha": 0.1},
    "soft": {"kind": "soft", "tau": 2.5, "alpha": 0.3, "label_smoothing": 0.2},
    "logits": {"kind": "logits", "tau": 3.0, "alpha": 0.7, "label_smoothing": 0.1},
}


def deits_loss(options: dict[str, Any], outputs: Tensor, given: Batch, teacher: Tensor) -> Tensor:
    """Return the loss of DeiT's losses.py. outputs: of the two heads, or of one for both."""
    here, kd = outputs[:, :CLASSES], outputs[:, -CLASSES:]
    alpha, tau, smoothing = options["alpha"], options.get("tau", 1.0), options.get("label_smoothing", 0.0)
    targets = torch.stack([F.one_hot(labels, CLASSES).double() for labels in (given.first, given.other)])
    targets = given.weight[:, None] * targets[0] + (1 - given.weight[:, None]) * targets[1]
    base = F.cross_entropy(here, (1 - smoothing) * targets + smoothing / CLASSES)
    if options["kind"] == "hard":
        distillation = F.cross_entropy(kd, teacher.argmax(dim=1))
    else:
        mine, theirs = (F.log_softmax(x / tau, dim=1) for x in (kd, teacher))
        distillation = F.kl_div(mine, theirs, reduction="sum", log_target=True) * (tau * tau) / kd.numel()
    return base * (1 - alpha) + distillation * alpha


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("kind", OPTIONS)
def test_loss_and_its_gradient_equal_deits(kind: str, mixed: bool) -> None:
    """Images that could not be read have no label, and what the teacher says about them counts for nothing either."""
    task, given = Distill(labels=LabelSet(CLASSES), **OPTIONS[kind]), batch(mixed)
    outputs = torch.randn(BATCH, (1 if kind == "logits" else 2) * CLASSES, dtype=torch.float64, requires_grad=True)
    teacher = torch.randn(BATCH, CLASSES, dtype=torch.float64)
    targets = task.with_teacher(given.labels, teacher)
    ours = task.total(outputs, targets) / task.count(targets, BATCH)
    expected = deits_loss(OPTIONS[kind], outputs, given, teacher)
    torch.testing.assert_close(ours, expected, rtol=1e-12, atol=0)
    gradients = [torch.autograd.grad(loss, outputs)[0] for loss in (ours, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-15)
    without = targets.clone()
    without[::3, : 2 if mixed else 1] = IGNORED
    there = torch.arange(BATCH) % 3 > 0
    torch.testing.assert_close(task.total(outputs, without), task.total(outputs[there], targets[there]))
    assert task.count(without, BATCH) == BATCH


def test_student_has_the_outputs_of_both_heads_in_training(tmp_path: Path) -> None:
    sizes = {"img_size": SIZE, "patch_size": PATCH, "num_classes": CLASSES, "embed_dim": WIDTH, "num_heads": HEADS}
    theirs = randomised(timm.models.deit.VisionTransformerDistilled(**sizes, depth=2)).train()
    import_weights(saved(tmp_path / "there", dict(theirs.state_dict()), TIMM_CONFIG), tmp_path / "student")
    ours = model_of(tmp_path / "student").train()
    ours.layers()["head"].distilled_training = True
    theirs.set_distilled_training(True)
    torch.testing.assert_close(ours(IMAGES), torch.cat(theirs(IMAGES), 1), rtol=1e-5, atol=1e-5)


@dataclass(frozen=True)
class Case:
    """Plans of student and teacher, and settings of the recipe."""

    mesh: str
    plan: str
    settings: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.settings.get('distill.kind', 'hard')} {self.mesh} from {self.plan}"


SOFT = {"distill.kind": "soft", "distill.tau": 2.5, "distill.alpha": 0.3}
PLAIN = {"distill.kind": "logits", "distill.tau": 3.0, "distill.alpha": 0.7, "train.precision": "fp64"}
VIRTUAL = {"parallel.schedule": "interleaved1f1b", "parallel.virtual_stages": 2, "parallel.microbatches": 4}
DISTILLED = {"model.distillation": True, "model.embed_dim": 24, "model.num_heads": 4, "model.depth": 4}
FP64 = DISTILLED | {"train.precision": "fp64"}
CASES = (
    Case("dp2", "dp", PLAIN),
    Case("tp2+sp", "fsdp2", FP64 | SOFT),
    Case("pp2", "tp", FP64 | SOFT | VIRTUAL),
    # Teachers on four ranks take micro-batches of four images, those of the students have two.
    Case("pp2xtp2", "dp", FP64 | {"parallel.microbatches": 8, "distill.alpha": 0.1}),
    Case("dp2xfsdp2", "tp2xdp2", FP64 | SOFT),
    Case("pp2", "fsdp", {**PLAIN, "model.name": "swin_nano_patch2_window4_32", "model.image_size": 16}),
    Case("fsdp2", "tp+sp", DISTILLED | {"train.precision": "fp16", "task.options": {"bce": True}}),
)


def recipe_of(case: Case, teacher: Path) -> Recipe:
    given = {"distill.teacher": str(teacher), "distill.plan": case.plan, "parallel.mesh": case.mesh, **case.settings}
    images = {"data.mean": (0.1, 0.2, 0.3), "data.std": (0.4, 0.5, 0.6)}  # those of `written_weights`
    return recipe_to_check({**images, **given})


def checked(device: torch.device, case: Case, teacher: Path) -> tuple[CheckResult, int]:
    """Return the result of a check, and the elements of the teacher's parameters on this rank; runs on every rank."""
    recipe = recipe_of(case, teacher)
    config = recipe.config(CLASSES)
    plan = recipe.plan(config)
    trained = build(recipe, config, plan, device, task_of(recipe, CLASSES))
    assert trained.teacher is not None
    stored = sum(local(p).numel() for p in trained.teacher.model.parameters())
    return check_plan(recipe, config, plan, device), stored


@pytest.mark.parametrize("case", CASES, ids=str)
def test_plans_match_one_process(case: Case, tmp_path: Path, ranks: Ranks) -> None:
    """Ranks take other images for the teacher than for the student, mixed by the check's recipe.

    The teacher is a Swin Transformer with drop-path, which evaluation leaves out.
    """
    config = model_config("swin_nano_patch2_window4_32", image_size=16, num_classes=CLASSES, drop_path=0.5)
    weights_of(randomised(LayeredModel(config)), config, tmp_path / "teacher")
    world = parse(case.mesh).world_size
    results = ranks(world).run(checked, case, tmp_path / "teacher")
    for result, _ in results:
        assert result.passed, result.worst
    planned = PlannedTeacher(open_weights(tmp_path / "teacher").config, DistillSection(plan=case.plan))
    assert max(stored for _, stored in results) == planned.elements(world), "the planner counts other parameters"


@dataclass(frozen=True)
class Data:
    """Data with the classes of the teacher, in another order."""

    names_of_classes: tuple[tuple[str, ...], ...]
    num_classes: int = CLASSES
    place: str = "data"
    fingerprint: str = ""


def logits_for(device: torch.device, teacher: Path, names: tuple[str, ...], images: Tensor) -> Tensor:
    given = {"distill.teacher": str(teacher), "distill.kind": "logits", "model.image_size": SIZE}
    recipe = recipe_to_check({**given, "data.mean": (0.5,) * 3, "data.std": (0.5,) * 3, "train.precision": "fp32"})
    config = recipe.config(CLASSES)
    plan = validate(parse("dp2"), config, BATCH)
    trained = build(recipe, config, plan, device, task_of(recipe, CLASSES), {TRAINING_DATA: Data((names,))})
    assert trained.teacher is not None
    return trained.teacher.logits(images[trained.teacher.model.image_rows(BATCH)])


def test_classes_of_the_teacher_are_matched_by_name(tmp_path: Path, ranks: Ranks) -> None:
    import_weights(saved(tmp_path / "there", timm_state(), TIMM_CONFIG), tmp_path / "teacher")
    names, order, images = tuple("abcdefg"), [3, 1, 0, 6, 5, 2, 4], batch(mixed=False).images
    (tmp_path / "teacher" / "classes.json").write_text(json.dumps(names))
    expected = timm_logits(timm_state(), images.float())[:, order]
    for logits in ranks(2).run(logits_for, tmp_path / "teacher", tuple(names[at] for at in order), images):
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(RankError, match=r"has other classes .*weights' classes 'a', 'b', 'c', … .7. lack 'z'"):
        ranks(2).run(logits_for, tmp_path / "teacher", (*names[:-1], "z"), images)
