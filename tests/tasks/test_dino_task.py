"""Self-distillation: its loss and gradients under plans against one process, and commands from training to features."""

import json
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

import vitpar.check.plan
from helpers import dino_formulas
from helpers.command_line import Command, Refused
from helpers.dino_models import CROPS, PROTOTYPES, SETTINGS, SIZES
from helpers.ranks import Ranks
from helpers.trained import assembled, rows, trainer_of
from vitpar import parse
from vitpar.check import check_plan
from vitpar.check.compare import CheckResult
from vitpar.check.samples import draw_samples
from vitpar.models.dino.config import DINOConfig
from vitpar.models.layers import LayeredModel
from vitpar.recipe import read_recipe
from vitpar.recipe.defaults import recipe_for
from vitpar.recipe.rates.shapes import RunLengths
from vitpar.tasks import inputs, task_of
from vitpar.tasks.dino import DINO
from vitpar.tasks.soft_loss import soft_cross_entropy
from vitpar.tasks.task import StepInput
from vitpar.tasks.teacher import SelfTeacher
from vitpar.training.build import build
from vitpar.training.probe import collapse_warning
from vitpar.weights.folder import open_weights

PLANS: dict[str, dict[str, Any]] = {
    "dp1": {"model.options": {**CROPS, "patch_head": True}},
    "tp2+sp": {"model.layer_scale": 0.1, "model.drop_path": 0.2},
    "pp2xtp2": {"parallel.microbatches": 4, "model.drop_path": 0.2, "lora.rank": 2},
    "pp2xdp2": {
        **{"parallel.schedule": "zbvzerobubble", "parallel.virtual_stages": 2, "parallel.microbatches": 4},
        "model.num_reg_tokens": 2,
    },
    "pp2: embed=fsdp2, 0-1=tp2, 2=dp2, *=fsdp2": {"parallel.microbatches": 2},
    "fsdp2xtp2+ckpt": {},
    "dp4": {"train.freeze": "embed, 0"},
    "tp4": {"task.options": {"prototypes": 96, "koleo_group": 4}},
    "dp2+offload": {},
}
QUICK = ("dp1", "tp2+sp", "pp2xtp2", "pp2xdp2", "pp2: embed=fsdp2, 0-1=tp2, 2=dp2, *=fsdp2")


def checked(device: torch.device, mesh: str, settings: dict[str, Any]) -> CheckResult:
    """Compare a training in float64 with one process. Runs on every rank."""
    values = {"data.path": "unused", "train.steps": 1, "train.batch_size": 16, "train.precision": "fp64", **SETTINGS}
    values |= {"train.clip_grad_norm": 0.1, "train.clip_by_part": True}
    recipe = read_recipe(None, {**values, "parallel.mesh": mesh, **settings})
    task = task_of(recipe, 1)
    config = recipe.config(task.outputs, task.model_options)
    with mock.patch.object(vitpar.check.plan, "NOISY_RUNS", 1):  # the tolerance does not depend on them
        return check_plan(recipe, config, recipe.plan(config), device, task, tolerance=1e-9)


@pytest.mark.parametrize(
    "mesh", [pytest.param(mesh, marks=() if mesh in QUICK else pytest.mark.slow) for mesh in PLANS]
)
def test_plans_train_as_one_process(mesh: str, ranks: Ranks) -> None:
    result = ranks(parse(mesh).world_size).run(checked, mesh, PLANS[mesh])[0]
    assert result.passed, result


def test_loss_is_the_cross_entropy_of_torch() -> None:
    """Three crops and two places of patches, of which the second of the second crop does not count."""
    torch.manual_seed(0)
    scores, targets = torch.randn(4, 7, 9, dtype=torch.float64, requires_grad=True), torch.randn(4, 6, 9).double()
    targets[:, 5] = float("nan")
    weights = DINO(prototypes=9, ibot_weight=0.5)._weights(scores, targets)
    loss = soft_cross_entropy(scores, targets, weights, 0.1, 9, None)
    (found,) = torch.autograd.grad(loss, scores)
    t, expected = targets.softmax(-1), torch.zeros((), dtype=torch.float64)
    for student, teacher in ((0, 1), (1, 0), (2, 0), (2, 1)):
        expected = expected + torch.nn.functional.cross_entropy(scores[:, student] / 0.1, t[:, teacher]) / 4
    for place, weight in ((2, 0.5), (3, 0.5), (4, 1.0)):
        entropy = torch.nn.functional.cross_entropy(scores[:, place + 1] / 0.1, t[:, place])
        expected = expected + 0.5 * 0.5 * weight * entropy
    torch.testing.assert_close(loss / 4, expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(found / 4, *torch.autograd.grad(expected, scores), rtol=1e-10, atol=1e-12)


def by_formulas(device: torch.device, options: dict[str, Any], sizes: dict[str, Any]) -> None:
    """Compare loss and gradients of one process with ``helpers.dino_formulas``."""
    values = {"data.path": "unused", "train.steps": 1, "train.batch_size": 16, "train.precision": "fp64", **SETTINGS}
    values |= {"task.options": {"prototypes": PROTOTYPES, "koleo_group": 16, **options}, "parallel.mesh": "dp1"}
    recipe = read_recipe(None, values | {"model.options": {**CROPS, **sizes}})
    task = task_of(recipe, 1)
    config = recipe.config(task.outputs, task.model_options).perturbed
    trained, (drawn,) = (
        build(recipe, config, recipe.plan(config), device, task),
        draw_samples(recipe, config, task, 1, 0).plain,
    )
    model, teacher = trained.model, trained.teacher
    assert isinstance(teacher, SelfTeacher) and isinstance(config, DINOConfig)
    torch.manual_seed(0)
    with torch.no_grad():
        for p in teacher.model.parameters():
            p.add_(0.05 * torch.randn_like(p))
    if (center := teacher.center) is not None:
        center = center.normal_().clone()
    pixels, sides = drawn.inputs.double(), dict(drawn.sides)
    pair = torch.randn(2, len(pixels), 3, config.image_size, config.image_size, dtype=torch.float64)
    apart = [teacher.features([images]) for images in pair]
    assert (both := teacher.features([*pair])) is not None
    assert all(one is not None and (both[:, k] - one[:, k]).norm() <= 1e-12 for k, one in enumerate(apart))
    assert apart[0] is not None and torch.equal(apart[0][:, 0], apart[0][:, 1]) and not both[:, 0].equal(both[:, 1])
    targets = teacher.targets(StepInput(pixels, pixels[:0], drawn.keys, sides))
    part = model.forward_backward(pixels, targets, drawn.keys, **sides)
    plain = [LayeredModel(c).double() for c in (config, config.of_teacher)]
    for copy, source in zip(plain, (model, teacher.model), strict=True):
        copy.load_state_dict(dict(source.named_parameters()), strict=False)
    expected = dino_formulas.loss(*plain, (config, config.of_teacher), pixels, sides["masks"], 0.04, center)
    expected.backward()
    assert part.item() == pytest.approx(expected.item(), rel=1e-10)
    there = dict(plain[0].named_parameters())
    for name, p in model.named_parameters():
        assert p.grad is not None and (found := there[name].grad) is not None
        assert (p.grad - found).norm() <= 1e-10 * found.norm(), name


@pytest.mark.parametrize("options", [{}, {"centering": "centering"}], ids=str)
@pytest.mark.parametrize("sizes", [{"patch_head": True}, {"local_crops": 0}], ids=str)
def test_loss_and_gradients_equal_other_formulas(options: dict[str, Any], sizes: dict[str, Any], ranks: Ranks) -> None:
    ranks(1).run(by_formulas, options, sizes)


def centred(device: torch.device, mesh: str, settings: dict[str, Any], run_dir: Path) -> tuple[list[float], Any]:
    """Train with centring. Returns the scores of the teacher before the last step and the centres around it."""
    values = {"train.steps": 3, "train.batch_size": 16, "train.precision": "fp64", "data.workers": 0, **SETTINGS}
    values |= {"task.options": {"prototypes": PROTOTYPES, "koleo_group": 2, "centering": "centering"}}
    recipe = read_recipe(
        None, {**values, "parallel.mesh": mesh, "model.image_size": 8, "model.patch_size": 2, **settings}
    )
    trainer = trainer_of(recipe, run_dir)
    teacher, kept = trainer.teacher, list[Any]()
    make, predict = teacher.targets, teacher.model.predict

    def recorded(given: Any) -> Any:
        before, scores = teacher.center.clone(), list[Any]()
        teacher.model.predict = lambda *a, **k: scores.append(predict(*a, **k)) or scores[-1]
        kept[:] = [before, make(given), scores[0], given.sides["masks"], teacher.temperature, teacher.center.clone()]
        return kept[1]

    teacher.targets = recorded
    trainer.run()
    return [row["loss"] for row in rows(run_dir)] if trainer.rank == 0 else [], kept if mesh == "dp1" else None


def test_centring_subtracts_the_mean_of_earlier_batches_under_any_plan(
    data: Path, tmp_path: Path, ranks: Ranks
) -> None:
    settings = {"data.path": str(data), "model.options": {**CROPS, "local_size": 4}}
    losses, (before, targets, scores, masks, temperature, after) = ranks(1).run(
        centred, "dp1", settings, tmp_path / "a"
    )[0]
    counts = masks.sum(-1)
    patches = [scores[i, 2 + 8 * c + p] for i in range(16) for c in range(2) for p in range(int(counts[i, c]))]
    torch.testing.assert_close(targets[:, :2], (scores[:, :2] - before[0]) / temperature)
    image = int(counts[:, 0].argmax())  # of the crops, this one has masked patches
    assert counts[image, 0]
    torch.testing.assert_close(targets[image, 2], (scores[image, 2] - before[1]) / temperature)
    means = torch.stack([scores[:, :2].flatten(0, 1).mean(0), torch.stack(patches).mean(0)])
    torch.testing.assert_close(after, 0.9 * before + 0.1 * means)
    assert before.any()
    saved = assembled(tmp_path / "a" / "checkpoints" / "step_3")["teacher.center"]
    torch.testing.assert_close(saved, after)
    for mesh in ("pp2xtp2", "dp2"):
        more = {**settings, "parallel.microbatches": 2}
        others = ranks(parse(mesh).world_size).run(centred, mesh, more, tmp_path / mesh)[0][0]
        assert others == pytest.approx(losses, rel=1e-10)


def test_rate_of_input_counts_all_crops(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = read_recipe(None, {"data.path": str(data), "train.steps": 1, **SETTINGS})
    sizes, loader = list[int](), inputs.TrainLoader

    def recorded(shards: Any, views: Any, **settings: Any) -> Any:
        sizes.extend(view.size for view in views)
        return loader(shards, views, **settings)

    monkeypatch.setattr(inputs, "TrainLoader", recorded)
    assert inputs.input_rate(recipe, recipe.config(1), "cpu")
    assert sizes == [16, 16, 8, 8, 8]


def test_schedules_are_those_of_dinov2() -> None:
    schedules = DINO(backbone_rate=0.5, heads_first=0.05).schedules(RunLengths(1250 * 64, 64, 125_000))
    temperatures = np.concatenate([np.linspace(0.04, 0.07, 37_500), [0.07] * 10])
    found = [schedules["teacher_temp"](step) for step in (1, 2, 30_000, 37_500, 37_505)]
    assert found == pytest.approx([temperatures[step - 1] for step in (1, 2, 30_000, 37_500, 37_505)], rel=1e-12)
    assert [schedules["rate_prototypes"](step) for step in (1, 1250, 1251)] == [0, 0, 1]
    assert [schedules["rate_backbone"](step) for step in (6250, 6251)] == [0, 0.5]
    assert [schedules["rate_patch_embed"](step) for step in (6250, 6251)] == pytest.approx([0, 0.1])
    assert collapse_warning(0.2, 0.5) is None and collapse_warning(0.2, 0.0) is None
    assert "deviate by 0.1, but by 0.5 before" in str(collapse_warning(0.1, 0.5))


def test_default_settings_are_those_of_the_short_configuration() -> None:
    options = {"data.path": "x", "task.name": "dino", "train.batch_size": 2048}
    recipe = recipe_for(1_281_167, options, side=500)
    assert recipe.model.name == "dino_vit_small_patch16_224" and recipe.lr == pytest.approx(4e-3 * 2**0.5, rel=1e-3)
    assert (recipe.optimizer.weight_decay, recipe.optimizer.weight_decay_end) == (0.04, 0.4)
    assert (recipe.train.ema_decay, recipe.train.ema_decay_end, recipe.train.clip_grad_norm) == (0.992, 1.0, 3.0)
    assert recipe.train.clip_by_part
    assert recipe.model.drop_path == 0.3 and recipe.data.crop_scale == (0.32, 1.0) and recipe.train.epochs == 100


SMALL = {**SIZES, "image_size": 8, "patch_size": 2, "depth": 2}
VIT = ("--model", "vit_custom", *(word for key, value in SMALL.items() for word in ("--set", f"model.{key}={value}")))
HEADS = (
    *(w for key, value in {**CROPS, "local_size": 4}.items() for w in ("--set", f"model.options.{key}={value}")),
    *("--set", f"task.options.prototypes={PROTOTYPES}", "--set", "task.options.koleo_group=4"),
)
DINO_WORDS = ("--task", "dino", "--model", "dino_vit_custom", *VIT[2:], *HEADS)
DATA = ("--data", "data", "--set", "data.workers=0", "--batch-size", "16")


def test_backbone_is_trained_resumed_continued_and_used(place: Path, vitpar: Command, refused: Refused) -> None:
    def said(*words: str) -> str:
        done = vitpar(*words)
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr

    trained = said("train", *DINO_WORDS, *DATA, "--mesh", "pp2xtp2", "--steps", "4", "--run-dir", "run")
    assert "val kNN" in trained and "crop 0.32-1" in trained and "100 outputs" in trained
    through = "--mesh dp2 --steps 4 --run-dir through --set checkpoint.every=2"
    said("train", *DINO_WORDS, *DATA, *through.split())
    again = ("train", "--resume", "through/checkpoints/step_2")
    said(*again, "--run-dir", "same")
    assert rows(place / "same", after=2) == rows(place / "through", after=2)
    one, other = (assembled(place / run / "checkpoints" / "step_4") for run in ("same", "through"))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    assert "resuming from" in said(*again, "--mesh", "fsdp2", "--run-dir", "moved")
    losses = [[row["loss"] for row in rows(place / run, after=2)] for run in ("moved", "through")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    features = said("features", "--data", "data", "--checkpoint", "run", "--out", "f.parquet")
    assert "f.parquet: 17 images, 24 features each (input of head.fc)" in features
    tuned = said("train", "--task", "classify", "--weights", "run", *DATA, "--steps", "2", "--run-dir", "tuned")
    assert "what only pretraining needs is left out" in tuned and "vit_custom" in tuned
    went_on = said("train", "--task", "dino", "--weights", "tuned", *HEADS, *DATA, "--steps", "3", "--run-dir", "on")
    assert "the heads and the mask token are new" in went_on and "newly initialised" not in went_on
    first = json.loads((place / "on" / "metrics.jsonl").read_text().splitlines()[1])
    assert first["rate_backbone"] in (0.0, 0.02) and first["teacher_temp"] == 0.04
    said("checkpoint", "export", "on", "--out", "timm", "--format", "timm")
    said("checkpoint", "import", "timm", "--out", "back")
    there, back = open_weights(place / "on" / "weights"), open_weights(place / "back")
    for name in ("embed.pos_embed", "blocks.1.attn.qkv.weight", "head.norm.bias"):
        assert torch.equal(there.read(name), back.read(name)), name
    refused(place, [(words.split(), sentence) for words, sentence in REFUSED])


REFUSED = (
    ("eval --checkpoint run --data data", "models of task 'dino' have no labels to be evaluated with"),
    (
        "train --data data --model dino_vit_small_patch16_224 --steps 1",
        "task 'classify' does not train dino_vit_small_patch16_224, which only task 'dino' does",
    ),
    (
        "train --data data --task dino --steps 1 --set train.ema_decay=0.9 --set augment.mixup=0.5",
        "augment.mixup is 0.5",
    ),
    (
        "train --data data --task dino --steps 1 --recipe digits --model dino_vit_tiny_patch16_224",
        "set train.ema_decay",
    ),
    (
        "train --data data --task dino --steps 1 --set task.options.prototypes=10",
        "task.options.prototypes is 10, but tokens of dino_vit_small",
    ),
    (
        "train --data data --task dino --steps 1 --set model.options.teacher=true",
        "model.options.teacher is true, which",
    ),
    ("train --data data --task dino --steps 1 --set task.options.koleo_group=1", "koleo_group is 1, not from 2 to"),
    ("train --data data --task dino --steps 1 --set task.options.mask_ratio_max=0.6", "is 0.6, not from 0 to 0.5"),
    (
        "train --data data --task dino --steps 1 --dry-run --mesh dp4 --batch-size 48",
        "a rank has 12 of the 48 images of a micro-batch under 'dp4', which are no groups of 16 for KoLeo: set",
    ),
    ("plan pp2xtp2+sp --task dino --batch-size 16", "a rank has 4 of the 4 images of a micro-batch under"),
    ("check --task dino --set task.options.centering=centering", "vitpar check has no formula of its own"),
    ("train --data data --task dino --steps 1 --set task.options.blur=[1,2]", "blur has 2 numbers instead of 3"),
    (
        "train --task dino --steps 1 --set stream.train=x.tar --set stream.samples=9 --set stream.classes=7 --set "
        "stream.val=x.tar --set stream.val_samples=9",
        "task 'dino' does not read streams",
    ),
)
