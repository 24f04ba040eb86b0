"""Distillation under plans of student and teacher: against timm's models with DeiT's loss, and by the check."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from helpers.foreign_models import randomised, timm_logits
from helpers.foreign_weights import CLASSES, HEADS, PATCH, SIZE, TIMM_CONFIG, WIDTH, saved, timm_state
from helpers.oracles import timm
from helpers.ranks import RankError, RankPool
from helpers.sharded_parameters import whole
from helpers.written_weights import weights_of
from vitpar import model_config, parse, validate
from vitpar.check import CheckResult, check_plan, recipe_to_check
from vitpar.models import IGNORED
from vitpar.models.layers import LayeredModel
from vitpar.models.vit.foreign import parts, renamed
from vitpar.planner.cost.teacher import PlannedTeacher
from vitpar.sharded import local, sharded_as
from vitpar.tasks import task_of
from vitpar.tasks.distill import Distill
from vitpar.tasks.task import LabelSet
from vitpar.training.build import TRAINING_DATA, build
from vitpar.training.recipe import read_recipe
from vitpar.training.recipe.sections import DistillSection
from vitpar.weights.folder import load_weights, open_weights
from vitpar.weights.importing import import_weights

BATCH, LR, STEPS, DECAY = 16, 0.1, 3, 0.7


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


def batches(mixed: bool) -> list[Batch]:
    draws = torch.Generator().manual_seed(3)
    return [
        Batch(
            torch.randn(BATCH, 3, SIZE, SIZE, generator=draws, dtype=torch.float64),
            *torch.randint(0, CLASSES, (2, BATCH), generator=draws),
            torch.rand(BATCH, generator=draws, dtype=torch.float64) if mixed else torch.ones(BATCH).double(),
        )
        for _ in range(STEPS)
    ]


@dataclass(frozen=True)
class Case:
    """Plans of student and teacher, and settings of the recipe."""

    mesh: str
    plan: str
    mixed: bool = False
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        kind: str = self.settings.get("distill.kind", "hard")
        return kind

    def __str__(self) -> str:
        return f"{self.kind} {self.mesh} from {self.plan}"


SOFT = {"distill.kind": "soft", "distill.tau": 2.5, "distill.alpha": 0.3}
PLAIN = {"distill.kind": "logits", "distill.tau": 3.0, "distill.alpha": 0.7, "train.label_smoothing": 0.1}
VIRTUAL = {"parallel.schedule": "interleaved1f1b", "parallel.virtual_stages": 2, "parallel.microbatches": 4}
CASES = (
    Case("dp2", "dp", settings=PLAIN),
    Case("fsdp2", "tp2", mixed=True),
    Case("tp2+sp", "fsdp2", settings=SOFT | {"train.label_smoothing": 0.2}),
    Case("pp2", "tp", True, SOFT | VIRTUAL),
    # Teachers on four ranks take micro-batches of four images, those of the students have two.
    Case("pp2xtp2", "dp", True, {"parallel.microbatches": 8, "distill.alpha": 0.1}),
    Case("pp2xtp2", "tp2xfsdp2+sp", True, PLAIN | {"parallel.microbatches": 8}),
    Case("dp2xfsdp2", "tp4", settings=SOFT),
)


def deits_loss(
    case: Case, outputs: tuple[Tensor, Tensor], batch: Batch, teacher: Tensor, *, smoothing: float
) -> Tensor:
    """Return the loss of DeiT's losses.py. outputs: of both heads."""
    alpha, tau = (case.settings.get(f"distill.{name}", usual) for name, usual in (("alpha", 0.5), ("tau", 1.0)))
    here, kd = outputs
    targets = torch.stack([F.one_hot(labels, CLASSES).double() for labels in (batch.first, batch.other)])
    targets = batch.weight[:, None] * targets[0] + (1 - batch.weight[:, None]) * targets[1]
    base = F.cross_entropy(here, (1 - smoothing) * targets + smoothing / CLASSES)
    if case.kind == "hard":
        distillation = F.cross_entropy(kd, teacher.argmax(dim=1))
    else:
        mine, theirs = (F.log_softmax(x / tau, dim=1) for x in (kd, teacher))
        distillation = F.kl_div(mine, theirs, reduction="sum", log_target=True) * (tau * tau) / kd.numel()
    return base * (1 - alpha) + distillation * alpha


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("case", CASES[:3], ids=str)
def test_images_without_label_do_not_count(case: Case, mixed: bool) -> None:
    """An image that could not be read has no label; what the teacher says about it is nothing either."""
    options = {name: case.settings.get(f"distill.{name}", usual) for name, usual in (("alpha", 0.5), ("tau", 1.0))}
    task, batch = Distill(labels=LabelSet(CLASSES), kind=case.kind, **options), batches(mixed)[0]
    outputs, teacher = torch.randn(2, BATCH, 2 * CLASSES, dtype=torch.float64)
    targets = task.with_teacher(batch.labels, teacher[:, :CLASSES])
    without = targets.clone()
    without[::3, : 2 if mixed else 1] = IGNORED
    there = torch.arange(BATCH) % 3 > 0
    torch.testing.assert_close(task.total(outputs, without), task.total(outputs[there], targets[there]))
    assert task.count(without, BATCH) == BATCH


def by_our_names(model: nn.Module, values: Callable[[nn.Parameter], Tensor], config: Any) -> dict[str, Tensor]:
    """Return tensors of timm's parameters by vitpar's names."""
    state = {name: values(p).detach().clone() for name, p in model.named_parameters()}
    made = parts(renamed({name: tuple(p.shape) for name, p in state.items()}), config)
    return {name: part.make(*(state[theirs] for theirs in part.names)) for name, part in made.items()}


def by_hand(case: Case, student: nn.Module, teacher: nn.Module, config: Any) -> dict[str, Any]:
    """Return losses, first gradients, final parameters and averages of a training of timm's models."""
    student, teacher = student.double().train(), teacher.double().eval()
    if config.distillation:
        student.set_distilled_training(True)
    sgd = torch.optim.SGD(student.parameters(), lr=LR)
    losses, gradients = [], {}
    averages = by_our_names(student, lambda p: p, config)
    for batch in batches(case.mixed):
        sgd.zero_grad()
        outputs = student(batch.images)
        with torch.no_grad():
            theirs = teacher(batch.images)
        outputs = outputs if config.distillation else (outputs, outputs)
        loss = deits_loss(case, outputs, batch, theirs, smoothing=case.settings.get("train.label_smoothing", 0.0))
        loss.backward()
        losses.append(loss.item())
        gradients = gradients or by_our_names(student, lambda p: p.grad, config)
        sgd.step()
        current = by_our_names(student, lambda p: p, config)
        averages = {name: DECAY * average + (1 - DECAY) * current[name] for name, average in averages.items()}
    return {"losses": losses, "gradients": gradients, "parameters": current, "averages": averages}


def under_plan(device: torch.device, case: Case, student: Path, teacher: Path) -> dict[str, Any]:
    """Return the same of a training of vitpar; runs on every rank."""
    config = open_weights(student).config
    recipe = read_recipe(
        None,
        {
            **{"data.path": "unused", "train.steps": 1, "train.batch_size": BATCH, "train.precision": "fp64"},
            **{"train.clip_grad_norm": 0.0, "train.ema_decay": DECAY, "optimizer.name": "sgd"},
            **{"optimizer.lr": LR, "optimizer.weight_decay": 0.0, "data.mean": (0.5,) * 3, "data.std": (0.5,) * 3},
            **{"parallel.mesh": case.mesh, "distill.teacher": str(teacher), "distill.plan": case.plan},
            **case.settings,
        },
    )
    trained = build(recipe, config, recipe.plan(config), device)
    model, found, losses = trained.model, dict[str, Any](), list[float]()
    assert trained.teacher is not None and trained.ema is not None
    stored = sum(local(p).numel() for p in trained.teacher.model.parameters())
    load_weights(model, student)
    trained.ema.restart()
    parameters = dict(model.named_parameters())

    def snapshot(number: int) -> None:
        if number == 1:
            found["gradients"] = {name: whole(p.grad).clone() for name, p in parameters.items() if p.grad is not None}

    step, rows = trained.step(after_gradients=snapshot), model.image_rows(BATCH)
    for number, batch in enumerate(batches(case.mixed), start=1):
        mine = batch.images[rows] if model.takes_images else None
        taught = batch.images[trained.teacher.model.image_rows(BATCH)]
        losses.append(model.global_loss(step(number, LR, mine, batch.labels, taught=taught).loss).item())
    averages = {name: whole(sharded_as(p, trained.ema.average[name])) for name, p in parameters.items()}
    found |= {"parameters": {name: whole(p).clone() for name, p in parameters.items()}, "averages": averages}
    return {"losses": losses, "stored": stored, **found}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_losses_gradients_and_updates_equal_deits(case: Case, tmp_path: Path, ranks: Callable[[int], RankPool]) -> None:
    vision_transformer, distilled = timm.models.vision_transformer.VisionTransformer, timm.models.deit
    sizes = {"img_size": SIZE, "patch_size": PATCH, "num_classes": CLASSES, "embed_dim": WIDTH, "num_heads": HEADS}
    torch.manual_seed(0)
    student = (vision_transformer if case.kind == "logits" else distilled.VisionTransformerDistilled)(**sizes, depth=4)
    teacher = vision_transformer(**sizes, depth=2, mlp_ratio=2)
    for name, model in (("student", student), ("teacher", teacher)):
        randomised(model)
        import_weights(saved(tmp_path / f"{name}-there", dict(model.state_dict()), TIMM_CONFIG), tmp_path / name)
    config = open_weights(tmp_path / "student").config
    expected = by_hand(case, student, teacher, config)
    seen, world = set[str](), parse(case.mesh).world_size
    every = ranks(world).run(under_plan, case, tmp_path / "student", tmp_path / "teacher")
    planned = PlannedTeacher(open_weights(tmp_path / "teacher").config, DistillSection(plan=case.plan))
    assert max(found["stored"] for found in every) == planned.elements(world), "the planner counts other parameters"
    for found in every:
        assert found["losses"] == pytest.approx(expected["losses"], rel=1e-10)
        for what in ("gradients", "parameters", "averages"):
            assert found[what], what
            for name, tensor in found[what].items():
                largest = expected[what][name].abs().max().item()
                torch.testing.assert_close(tensor, expected[what][name], rtol=0, atol=1e-10 * largest, msg=name)
        seen |= found["gradients"].keys()
    assert seen == expected["gradients"].keys()


DISTILLED = {"model.distillation": True, "model.embed_dim": 24, "model.num_heads": 4, "model.depth": 4}
CHECKED = (
    # Ranks take other images for the teacher than for the student, mixed by the check's recipe.
    Case("pp2xtp2", "dp", settings=DISTILLED | {"train.precision": "fp64"}),
    Case("tp2", "dp", settings=DISTILLED | SOFT | {"train.precision": "bf16"}),
    Case("pp2", "fsdp", settings={**PLAIN, "model.name": "swin_nano_patch2_window4_32", "model.image_size": 16}),
    Case("fsdp2", "tp+sp", settings=DISTILLED | {"train.precision": "fp16", "task.options": {"bce": True}}),
)


def run_check(device: torch.device, case: Case, teacher: Path) -> CheckResult:
    given = {"distill.teacher": str(teacher), "distill.plan": case.plan, "parallel.mesh": case.mesh, **case.settings}
    images = {"data.mean": (0.1, 0.2, 0.3), "data.std": (0.4, 0.5, 0.6)}  # those of `written_weights`
    recipe = recipe_to_check({**images, **given})
    config = recipe.config(CLASSES)
    return check_plan(recipe, config, recipe.plan(config), device)


@pytest.mark.parametrize("case", CHECKED, ids=str)
def test_check_passes(case: Case, tmp_path: Path, ranks: Callable[[int], RankPool]) -> None:
    """The teacher is a Swin Transformer with drop-path, which evaluation leaves out."""
    config = model_config("swin_nano_patch2_window4_32", image_size=16, num_classes=CLASSES, drop_path=0.5)
    weights_of(randomised(LayeredModel(config)), config, tmp_path / "teacher")
    for result in ranks(parse(case.mesh).world_size).run(run_check, case, tmp_path / "teacher"):
        assert result.passed, result.worst


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


def test_classes_of_the_teacher_are_matched_by_name(tmp_path: Path, ranks: Callable[[int], RankPool]) -> None:
    import_weights(saved(tmp_path / "there", timm_state(), TIMM_CONFIG), tmp_path / "teacher")
    names, order, images = tuple("abcdefg"), [3, 1, 0, 6, 5, 2, 4], batches(mixed=False)[0].images
    (tmp_path / "teacher" / "classes.json").write_text(json.dumps(names))
    expected = timm_logits(timm_state(), images.float())[:, order]
    for logits in ranks(2).run(logits_for, tmp_path / "teacher", tuple(names[at] for at in order), images):
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(RankError, match=r"has other classes .*weights' classes 'a', 'b', 'c', … .7. lack 'z'"):
        ranks(2).run(logits_for, tmp_path / "teacher", (*names[:-1], "z"), images)
