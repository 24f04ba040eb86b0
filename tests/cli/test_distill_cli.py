"""Distillation on the command line: a student learns from a run, is resumed under other plans, and evaluated alone."""

import json
import shutil
from pathlib import Path

import pytest

from helpers.command_line import Command, Refused
from helpers.run_folder import losses_of
from helpers.shared_runs import SMALL, shared_run
from helpers.small_data import CLASSES, rename_classes

DISTILLED = ("--set", "model.depth=2", "--set", "model.distillation=true")
TEACHER = ("--set", "distill.teacher=teacher")
LOGITS = (*TEACHER, "--set", "distill.kind=logits")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with packed data, a recipe, and the run `teacher`, which is larger than the students."""
    folder = tmp_path_factory.mktemp("distilled") / "place"
    shutil.copytree(shared_run("small", tmp_path_factory), folder)
    (folder / "run").rename(folder / "teacher")
    (folder / "recipe.toml").write_text(SMALL + "checkpoint.every = 2\ncheckpoint.keep = 0\n")
    return folder


def test_student_is_trained_resumed_under_other_plans_and_evaluated_without_its_teacher(
    place: Path, vitpar: Command
) -> None:
    def said(*words: str, code: int = 0) -> str:
        done = vitpar(*words)
        assert done.returncode == code, done.stderr
        return done.stdout + done.stderr

    train = ("train", "--recipe", "recipe.toml", *DISTILLED, *TEACHER)
    said(*train, "--mesh", "pp2", "--set", "distill.plan=fsdp2", "--run-dir", "student")
    said(*train, "--mesh", "dp1", "--run-dir", "alone")
    said("train", "--resume", "student/checkpoints/step_2", "--mesh", "tp2", "--run-dir", "resumed")
    losses = [losses_of(place / run) for run in ("student", "alone", "resumed")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert losses[2] == pytest.approx(losses[1][2:], rel=1e-5)
    said("train", "--recipe", "recipe.toml", *DISTILLED, "--run-dir", "untaught")
    assert losses_of(place / "untaught") != pytest.approx(losses[1], rel=1e-2)

    other = ("train", "--resume", "alone", "--set", "distill.teacher=student", "--steps", "6")
    refused = said(*other, "--allow-change", "train.steps", code=2)
    assert "these settings changed: the teacher differs" in refused
    assert "--allow-change distill.teacher" in refused
    # A copy elsewhere is the same teacher.
    shutil.copytree(place / "teacher" / "weights", place / "moved")
    (place / "teacher").rename(place / "away")
    assert "distill.teacher 'teacher/weights' does not exist" in said("train", "--resume", "alone", code=2)
    assert "the run is complete" in said("train", "--resume", "alone", "--set", "distill.teacher=moved")
    figures = json.loads(said("eval", "--checkpoint", "student", "--json"))
    assert 0 <= figures["top1"] <= 1
    (place / "away").rename(place / "teacher")


def test_check_and_bench_run_with_a_teacher(place: Path, vitpar: Command) -> None:
    recipe = ("--recipe", "recipe.toml", "--mesh", "tp2", *DISTILLED, *TEACHER)
    checked = vitpar("check", *recipe, "--set", "distill.plan=fsdp")
    assert checked.returncode == 0, checked.stdout + checked.stderr
    benched = vitpar("bench", *recipe, "--steps", "2", "--repeats", "1", "--warmup", "1", "--json")
    assert benched.returncode == 0, benched.stderr
    assert "teacher" in [phase["name"] for phase in json.loads(benched.stdout)["phases"]]


REFUSED = (
    ((*TEACHER,), "vit_custom has no distillation token: set model.distillation to true, or distill.kind to logits"),
    ((*LOGITS, *DISTILLED), "vit_custom has a distillation token, which is to learn from the teacher alone"),
    ((*LOGITS, "--set", "distill.plan=pp2"), "distill.plan 'pp2' has pp, which a teacher does not support"),
    ((*LOGITS, "--set", "distill.plan=dp+ckpt"), "distill.plan 'dp+ckpt' has +ckpt"),
    ((*LOGITS, "--set", "distill.plan=tp4"), "distill.plan: 'tp4' needs 4 ranks but the world has 2"),
    ((*LOGITS, "--set", "data.mean=[0.5,0.5,0.5]"), "takes other images than the model, with mean (0.3, 0.4, 0.5)"),
    ((*LOGITS, "--set", "model.image_size=16"), "takes other images than the model, with image_size 8 instead of 16"),
    ((*LOGITS, "--set", "distill.teacher=nowhere"), "distill.teacher 'nowhere' does not exist: name a run"),
    ((*LOGITS, "--set", "task.options={class_weights=[1,1,1,1,1,1,2]}"), "do not go with a teacher"),
    ((*TEACHER, "--set", "train.image_sizes=4 until 50 %"), "but a teacher takes images of one size"),
    ((*TEACHER, "--task", "mlm"), "but task 'mlm' has no classes to learn from a teacher"),
)


def test_what_does_not_fit_is_refused_before_ranks_start(place: Path, refused: Refused) -> None:
    refused(place, REFUSED, "train", "--recipe", "recipe.toml", "--mesh", "dp2", "--dry-run")
    for command in ("check", "bench", "plan"):
        mesh = ("dp2",) if command == "plan" else ("--mesh", "dp2")
        refused(place, REFUSED[1:2], command, *mesh, "--recipe", "recipe.toml")
    refused(place, REFUSED[:1], "search", "--recipe", "recipe.toml", "--cluster", "2xL40S")
    rename_classes(place / "data", [f"other {number}" for number in range(CLASSES)])
    refused(place, [(LOGITS, "has other classes")], "train", "--recipe", "recipe.toml")
