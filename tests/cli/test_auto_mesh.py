"""`vitpar train --mesh auto`: searches a plan, trains under it, and stores it."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from helpers.command_line import Command, Refused, refusal
from helpers.run_folder import losses_of
from helpers.shared_runs import SMALL, shared_run
from vitpar.models import model_config
from vitpar.planner.sources import estimated_costs
from vitpar.recipe import read_recipe
from vitpar.strategy.plan_json import read_plan

RECIPE = SMALL + "[checkpoint]\nevery = 2\n"
AUTO = ("train", "--recipe", "recipe.toml", "--mesh", "auto")
SHEET = ("--cluster", "8xH100", "--ranks", "2")
WORLD = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")


@pytest.fixture(scope="module")
def place(place: Path) -> Path:
    """Return a folder with packed data and recipes, to run commands in."""
    (place / "planned.toml").write_text(RECIPE + '[parallel]\nmesh = "pp2"\nsplit = [1, 3]\n')
    return place


@pytest.fixture(scope="module")
def searched_run(place: Path, vitpar: Command) -> "subprocess.CompletedProcess[str]":
    """Run `vitpar train --mesh auto` into the folder `run` and return its output."""
    # --mesh auto ignores the plan in the recipe.
    words = ("train", "--recipe", "planned.toml", "--mesh", "auto")
    done = vitpar(*words, *SHEET, "--memory", "4GB", "--microbatches", "4", "--run-dir", "run")
    assert done.returncode == 0, done.stderr
    return done


def test_found_plan_is_trained_and_stored(
    place: Path, searched_run: "subprocess.CompletedProcess[str]", tmp_path_factory: pytest.TempPathFactory
) -> None:
    words = searched_run.stdout
    plan = read_plan(place / "run" / "plan.json")
    assert plan.world_size == 2 and plan.microbatches == 4 and words.startswith(str(plan))
    assert "why not" in words and "times are estimates" in words and "of 4 GB" in words
    assert "\nthe plan was searched, predicted:" in words
    assert read_recipe(place / "run" / "recipe.toml").parallel.mesh == str(plan)
    alone = shared_run("small", tmp_path_factory) / "run"
    assert losses_of(place / "run") == pytest.approx(losses_of(alone), rel=1e-5)


@pytest.mark.slow
def test_resumed_run_keeps_its_plan_on_as_many_ranks(
    place: Path, vitpar: Command, searched_run: "subprocess.CompletedProcess[str]"
) -> None:
    for folder in ("again", "fewer"):
        shutil.copytree(place / "run", place / folder)
        shutil.rmtree(place / folder / "checkpoints" / "step_4")
    plan = read_plan(place / "run" / "plan.json")
    again = vitpar(*AUTO, *SHEET, "--resume", "auto", "--run-dir", "again")
    assert again.returncode == 0, again.stderr
    assert f"the run resumes under its plan '{plan}'" in again.stdout and "why not" not in again.stdout
    assert losses_of(place / "again") == pytest.approx(losses_of(place / "run"), rel=1e-5)
    fewer = vitpar(*AUTO, "--cluster", "8xH100", "--ranks", "1", "--resume", "auto", "--run-dir", "fewer")
    assert fewer.returncode == 0, fewer.stderr
    assert read_plan(place / "fewer" / "plan.json").world_size == 1
    assert "the plan was searched, predicted:" in fewer.stdout
    assert losses_of(place / "fewer") == pytest.approx(losses_of(place / "run"), rel=1e-5)


@pytest.mark.slow
def test_torchrun_ranks_agree_on_the_plan(place: Path, vitpar: Command) -> None:
    done = vitpar(*AUTO, "--cluster", "8xH100", "--run-dir", "torchrun", launcher=TORCHRUN)
    assert done.returncode == 0, done.stderr
    assert read_plan(place / "torchrun" / "plan.json").world_size == 2
    assert done.stdout.count("why not") == 1


def test_ranks_of_a_launcher_do_not_measure(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {**WORLD, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(place)
    said = refusal([*AUTO, "--run-dir", "no"], monkeypatch, capsys)
    assert said.startswith("error: no profile of this machine found (hardware.json), and ranks of a launcher")
    assert not (place / "no").exists()


@pytest.mark.slow
def test_missing_profiles_are_measured(place: Path, vitpar: Command) -> None:
    # One rank has no links to measure, so this takes seconds.
    done = vitpar(*AUTO, "--ranks", "1", "--run-dir", "measured")
    assert done.returncode == 0, done.stderr
    found = re.findall(r"measuring (.*), once: a few minutes, saved to (\S+)", done.stderr)
    assert [what for what, _ in found] == ["this machine", "vit_custom in fp32"]
    assert all((place / file).exists() for _, file in found)
    assert "times are estimates" not in done.stdout and "why not" in done.stdout


def test_matching_profiles_in_the_folder_are_reused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vitpar.planner.measure.device import device_name
    from vitpar_cli import automatic

    config = model_config("vit_tiny_patch16_224", num_classes=10)
    costs = estimated_costs(config, "2xH100", "fp32", compiled=False)
    here = {"device": "cpu", "device_name": device_name(torch.device("cpu"))}
    monkeypatch.chdir(tmp_path)
    measured: list[list[str]] = []

    def profile(command: list[str], **_: object) -> "subprocess.CompletedProcess[str]":
        measured.append(command)
        out = Path(command[command.index("--out") + 1])
        what = costs.hardware if "hardware" in command else costs.model
        what.model_copy(update=here).save(out)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", profile)
    named = {"data.path": "x", "train.steps": 1, "model.name": config.name}
    recipe = read_recipe(None, named).with_precision("fp32")

    def sources() -> int:
        before = len(measured)
        automatic._profiled(recipe, config, "cpu", 2, automatic.MachineOptions())
        return len(measured) - before

    assert sources() == 2 and sources() == 0
    costs.hardware.model_copy(update=here | {"ranks": 4}).save(tmp_path / "hardware.json")
    assert sources() == 0  # made for another number of ranks, so the stored one is used
    shutil.rmtree(tmp_path / "runs")
    costs.hardware.model_copy(update=here).save(tmp_path / "hardware.json")
    (tmp_path / "model.json").write_text("{}")
    assert sources() == 1 and "model" in measured[-1]


INVALID = [
    (("--mesh", "dp2", "--memory", "4GB"), "--memory requires --mesh auto, but the mesh is 'dp2': leave one out"),
    (("--mesh", "dp2", "--cluster", "8xH100"), "--cluster requires --mesh auto"),
    (("--mesh", "auto", "--split", "balanced"), "parallel.split is searched with --mesh auto"),
    (("--mesh", "auto", *SHEET, "--memory", "10KB"), "no plan fits into 0.01 MB per rank"),
    (("--mesh", "auto", "--hardware", "gone.json"), "gone.json"),
]


def test_invalid_options_are_refused(place: Path, refused: Refused) -> None:
    refused(place, INVALID, "train", "--recipe", "recipe.toml")
    message = "parallel.mesh is 'auto', which only `vitpar train` supports"
    others = [["check", "--mesh", "auto"], ["bench", "--mesh", "auto"], ["plan", "auto"]]
    refused(place, [([*words, "--recipe", "recipe.toml"], message) for words in others])
