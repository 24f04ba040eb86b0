"""A task of the user's own: checked under plans, evaluated exactly, and refused where it does not fit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from helpers.paths import ROOT
from helpers.ranks import Ranks
from helpers.small_data import CLASSES, VAL, pack_small, rename_classes
from helpers.trained import recipe_of, rows, train
from vitpar import parse, validate
from vitpar.check import CheckResult, check_plan
from vitpar.checkpoint.folder import Checkpoints
from vitpar.data.images import decode
from vitpar.data.shards.shard_set import ShardSet
from vitpar.data.transforms.batch import Normalize
from vitpar.data.transforms.sample import EvalTransform
from vitpar.errors import RecipeError
from vitpar.models import IGNORED
from vitpar.models.layers import LayeredModel
from vitpar.recipe import Recipe, read_recipe
from vitpar.tasks import LabelSet, Task, load, task_of
from vitpar.tasks.probe import refuse_wrong_task

TASK = f"{ROOT / 'examples' / 'own_task.py'}:Value"


def value(**options: Any) -> Task:
    load(TASK)
    settings = {"data.path": "x", "train.steps": 1, "task.name": TASK, "task.options": options or None}
    return task_of(read_recipe(None, settings), LabelSet(4, ("0.5", "-2", "30", "7")))


def test_loss_ignores_what_has_no_label() -> None:
    """Compared with a plain loop over the samples that count."""
    task = value(tolerance=1.0)
    outputs = torch.tensor([[1.0], [2.0], [9.0], [4.0]], dtype=torch.float64)
    targets = task.counted_targets(torch.tensor([0, IGNORED, 3, 2]))
    losses = [(1.0 - 0.5) ** 2, (9.0 - 7) ** 2, (4.0 - 30) ** 2]
    assert task.total(outputs, targets).item() == pytest.approx(sum(losses))
    assert task.count(targets, 4) == 4
    assert task.result(task.sums(outputs, targets)) == pytest.approx(
        {"loss": sum(losses) / 3, "mae": (0.5 + 2 + 26) / 3, "within": 1 / 3}
    )
    assert task.outputs == 1 and task.best.name == "mae" and not task.best.is_better(2.0, than=1.0)


def checked(device: torch.device, mesh: str, mistake: bool) -> CheckResult:
    """Check the task under a plan; runs on every rank."""
    load(TASK)
    options = {"task.name": TASK, "model.name": "vit_nano_patch4_16", "data.path": "unused", "train.steps": 1}
    recipe = read_recipe(None, {**options, "train.batch_size": 16, "model.depth": 2, "train.precision": "fp64"})
    task = task_of(recipe, LabelSet(4, ("0.5", "-2", "30", "7")))
    config = recipe.config(task.outputs)
    with pytest.MonkeyPatch.context() as patch:
        if mistake:

            def losses(self: Task, outputs: Tensor, targets: Tensor) -> Tensor:
                return (outputs[:, 0] - targets).square() * 1.001

            patch.setattr(type(task), "losses", losses)
        return check_plan(recipe, config, validate(parse(mesh), config, 16), device, task)


@pytest.mark.parametrize(("mesh", "mistake"), [("pp2", False), ("dp2", True)])
def test_check_compares_with_the_second_formula(mesh: str, mistake: bool, ranks: Ranks) -> None:
    for result in ranks(parse(mesh).world_size).run(checked, mesh, mistake):
        assert result.passed != mistake, result.worst


def trained(device: torch.device, recipe: Recipe, run: Path) -> None:
    load(TASK)
    train(device, recipe, run)


def test_run_is_evaluated_and_its_best_checkpoint_kept(tmp_path: Path, ranks: Ranks) -> None:
    """The best has the least error. The last evaluation is compared with a plain loop over the saved weights."""
    data = pack_small(tmp_path)
    names = [str(number * 1.5) for number in range(CLASSES)]
    rename_classes(data, names)
    more = {"task.name": TASK, "task.options": {"tolerance": 2.0}, "train.eval_every": 2, "train.ema_decay": None}
    best = {"checkpoint.keep_best": True, "checkpoint.keep": 1, "checkpoint.every": 100}
    recipe = recipe_of(data, "dp2", **more, **best)
    ranks(2).run(trained, recipe, tmp_path / "run")
    evaluations = rows(tmp_path / "run", "eval")
    assert [list(row) for row in evaluations] == [["kind", "step", "samples", "loss", "mae", "within"]] * 3
    least = min(evaluations, key=lambda row: row["mae"])["step"]
    assert Checkpoints(tmp_path / "run" / "checkpoints").steps() == sorted({least, 6})

    weights = tmp_path / "run" / "weights"
    assert "classes.json" not in {path.name for path in weights.iterdir()}, "an output is no label"
    model = LayeredModel(recipe.config(1)).eval()
    model.load_state_dict(
        {k: v for path in weights.glob("*.safetensors") for k, v in load_file(path).items()}, strict=False
    )
    shards, settings, errors = ShardSet.open(data, "val"), recipe.data, []
    prepare, normalize = EvalTransform(8, settings.crop_pct), Normalize(settings.mean, settings.std)
    for i in range(len(shards)):
        with torch.no_grad():
            output = model(normalize(prepare(decode(shards.read(i)))[None])).item()
        errors.append(abs(output - 1.5 * shards.label(i)))
    assert evaluations[-1]["samples"] == VAL
    assert evaluations[-1]["mae"] == pytest.approx(sum(errors) / VAL, rel=1e-4)
    assert evaluations[-1]["within"] == sum(error <= 2.0 for error in errors) / VAL


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"task.name": "klassify"}, r"unknown task 'klassify' \(did you mean 'classify'\?\): use classify, "),
        ({"task.name": "gone.py:Mine"}, r"is run only if you name it: give --task gone.py:Mine"),
        ({"task.options": {"tolerances": 1}}, r"has 'tolerances', .* does not \(did you mean 'tolerance'\?\): leave"),
        ({"train.label_smoothing": 0.1}, r"train.label_smoothing is 0.1, which task .* does not have: set it to 0"),
        ({"augment.cutmix": 1.0}, r"augment.cutmix is 1.0, but task .* does not mix images: set it to 0"),
    ],
)
def test_what_does_not_fit_a_task_is_refused(settings: dict[str, Any], words: str) -> None:
    load(TASK)
    recipe = read_recipe(None, {"data.path": "x", "train.steps": 1, "task.name": TASK, **settings})
    with pytest.raises(RecipeError, match=words):
        task_of(recipe, 4)


def test_file_that_fails_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("class Mine: pass\n")
    with pytest.raises(
        RecipeError, match=r"has no task called 'Value': name a dataclass that derives from vitpar.Task"
    ):
        load(f"{tmp_path}/mine.py:Value")
    with pytest.raises(RecipeError, match=r"there is no file .*: name the file of your task, as in --task my"):
        load(f"{tmp_path}/none.py:Value")


def test_another_task_leaves_out_what_a_recipe_has_for_classes(tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text("[data]\npath = 'x'\n[train]\nsteps = 1\nlabel_smoothing = 0.1\n[augment]\nmixup = 0.8\n")
    assert read_recipe(path).augment.mixup == 0.8
    recipe = read_recipe(path, {"task.name": TASK})
    assert (recipe.augment.mixup, recipe.train.label_smoothing) == (0, 0)
    assert read_recipe(path, {"task.name": "classify"}).train.label_smoothing == 0.1
    written = tmp_path / "written.toml"
    written.write_text(recipe.to_toml())
    assert read_recipe(written) == recipe


WRONG = [
    (
        "losses",
        lambda self, outputs, targets: (outputs[:, 0] - targets).square().mean(),
        r"`losses` .* is \[\] for 3 s",
    ),
    ("losses", lambda self, outputs, targets: outputs + torch.ones(7, 2), r"`losses` of task .* fails: RuntimeError: "),
    ("figures", lambda self, outputs, targets: {"mae": outputs[:, 0]}, r"has no 'within', which METRICS names: add it"),
    ("reference", Task.reference, r"has no `reference`: define it"),
    ("targets", lambda self, labels: 3, r"`targets` of task .* has no row for each sample"),
    ("predict", lambda self, outputs: {"value": outputs.sum()}, r"gives a 'value' that is not \[batch\] or"),
    ("outputs", property(lambda self: "one"), r"`outputs` of task .* is one: return a number from 1"),
]


@pytest.mark.parametrize(("name", "function", "words"), WRONG, ids=[row[0] for row in WRONG])
def test_mistakes_in_a_task_are_one_sentence(
    name: str, function: Any, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = value()
    refuse_wrong_task(task, checked=True)
    monkeypatch.setattr(type(task), name, function)
    with pytest.raises(RecipeError, match=words):
        refuse_wrong_task(task, checked=True)
