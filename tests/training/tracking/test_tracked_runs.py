"""Runs with trackers: what they log is in metrics.jsonl, and whatever they do, the training is the same."""

import json
from collections.abc import Callable
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import pytest

from helpers.fake_trackio import FakeTrackio
from helpers.ranks import Ranks
from helpers.run_folder import losses_of, rows_of
from helpers.tracker_files import EventFiles, wandb_history, wandb_records
from helpers.trained import CPU, STEPS, prepared, recipe_of, train
from vitpar.errors import RecipeError
from vitpar.recipe import Recipe
from vitpar.recipe.sections import running
from vitpar.training import recorded
from vitpar.training.events import Reporter
from vitpar.training.trainer import Trainer

NOT_NUMBERS = ("kind", "step", "time", "mfu", "memory_by_rank", "samples_crc32")
"""Keys of rows that trackers do not get: the mfu of a CPU is unknown, and lists are no numbers."""


class Notes(Reporter):
    """Reporter that keeps the warnings."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


def trained(recipe: Recipe, run: Path, **more: Any) -> list[str]:
    """Train in this process and return the warnings."""
    reporter = Notes()
    Trainer(prepared(recipe, run_dir=run, **more), CPU, reporter=reporter).run()
    return reporter.notes


def tracked_recipe(data: Path, *trackers: str, mesh: str = "dp1", **changed: Any) -> Recipe:
    more = {"track.trackers": trackers, "train.log_every": 1, "train.eval_every": 2}
    return recipe_of(data, mesh, **{**more, **changed})


def expected(run: Path, name: str) -> list[tuple[int, Any]]:
    """Return steps and values of a number such as val/loss in metrics.jsonl, in the precision of event files."""
    kind, _, key = name.partition("/")
    rows = rows_of(run, {"train": "train", "val": "eval"}[kind])
    return [(row["step"], pytest.approx(numbers_of(row)[key], rel=1e-6)) for row in rows if key in numbers_of(row)]


def numbers_of(row: dict[str, Any]) -> dict[str, float]:
    """Return the numbers of a row of metrics.jsonl, those of groups of layers as `grad_norms/<group>`."""
    flat = dict(row)
    for name in ("grad_norms", "update_ratios"):
        flat |= {f"{name}/{group}": value for group, value in flat.pop(name, {}).items()}
    return {key: value for key, value in flat.items() if key not in NOT_NUMBERS}


def test_tensorboard_has_the_numbers_and_facts_of_a_run_and_its_continuation(
    data: Path, tmp_path: Path, alone: None
) -> None:
    run = tmp_path / "run"
    assert trained(tracked_recipe(data, "tensorboard"), run) == []
    found = EventFiles(run)
    names = {f"train/{key}" for key in numbers_of(rows_of(run)[0])}
    names |= {f"val/{key}" for key in numbers_of(rows_of(run, "eval")[0])}
    assert {name for name in found.names if not name.startswith("summary/")} == names
    for name in names:
        assert found.scalars(name) == expected(run, name), name
    assert found.scalars("summary/top1") == expected(run, "val/top1")[-1:]
    for name in ("recipe.toml", "plan.json", "env.json"):
        assert found.texts(name) == [(0, f"```\n{(run / name).read_text()}\n```")]
    values = found.hyper_parameters()
    assert values["train.batch_size"] == 24 and values["model.init"] == "moco" and values["data.flip"] == 0.5
    assert values["train.ema_warmup"] is False and "train.epochs" not in values

    resumed = tracked_recipe(data, "tensorboard", **{"train.log_every": 2})
    trained(resumed, run, resume=run / "checkpoints" / f"step_{STEPS}")
    found = EventFiles(run)
    assert len(found.files) == 2
    steps = [step for step, _ in found.scalars("train/loss")]
    assert steps == [1, 2, 3, 4, 6], "steps 4 to 6 are those of the resumed run, which logs the first and even ones"
    assert [step for step, _ in found.scalars("val/loss")] == [2, 4, 6]
    assert [step for step, _ in found.texts("recipe.toml")] == [0, STEPS]
    assert 'log_every = "2 steps"' in found.texts("recipe.toml")[1][1]


def test_wandb_writes_offline_and_resumes_under_the_same_id(data: Path, tmp_path: Path, alone: None) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed")
    run = tmp_path / "run"
    recipe = tracked_recipe(data, "wandb", **{"track.project": "ours", "track.name": "mine"})
    assert trained(recipe, run) == []
    history = wandb_history(run)
    assert [step for step, _ in history] == [1, 2, 3, 4, 5, 6]
    assert [values["train/loss"] for _, values in history] == losses_of(run)
    assert [(step, values["val/top1"]) for step, values in history if "val/top1" in values] == [
        (row["step"], row["top1"]) for row in rows_of(run, "eval")
    ]
    assert history[-1][1]["summary/steps"] == 6
    (begun,) = [record.run for record in wandb_records(run) if record.WhichOneof("record_type") == "run"]
    assert (begun.project, begun.display_name) == ("ours", "mine")
    config = {item.key: json.loads(item.value_json) for item in begun.config.update}
    assert config["recipe"]["train"]["batch_size"] == 24 and config["plan"]["strategy"] == "dp1"
    assert config["hardware"]["ranks"] == 1 and config["hardware"]["torch"] and "devices" in config["hardware"]

    longer = tracked_recipe(data, "wandb", **{"train.steps": 8})
    allowed = ("train.steps",)
    trained(longer, run, resume=run / "checkpoints" / f"step_{STEPS}", allow_change=allowed)
    assert [step for step, _ in wandb_history(run)] == [1, 2, 3, 4, 5, 6, 7, 8]
    ids = [record.run.run_id for record in wandb_records(run) if record.WhichOneof("record_type") == "run"]
    assert ids == [json.loads((run / "track.json").read_text())["id"]] * 2


def test_only_rank_0_has_trackers(data: Path, tmp_path: Path, ranks: Ranks) -> None:
    run = tmp_path / "run"
    ranks(2).run(train, tracked_recipe(data, "tensorboard", mesh="pp2"), run)
    found = EventFiles(run)
    assert len(found.files) == 1
    for name in ("train/loss", "train/grad_norm", "val/loss"):
        assert found.scalars(name) == expected(run, name)


FAULTS = ("raise in log", "block in finish")
"""The others of test_tracker.py end in the same way."""


def test_no_tracker_changes_or_stops_a_run(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alone: None
) -> None:
    trackio = FakeTrackio(tmp_path, monkeypatch)
    trained(tracked_recipe(data), tmp_path / "none")
    assert not (tmp_path / "none" / "track.json").exists()
    assert "track" not in (tmp_path / "none" / "recipe.toml").read_text()
    for number, fault in enumerate(FAULTS):
        trackio.misbehave(fault)
        blocks = fault.startswith("block")
        monkeypatch.setattr(recorded, "FLUSH_S", 0.1 if blocks else 60.0)
        run = tmp_path / f"run{number}"
        notes = trained(tracked_recipe(data, "trackio"), run)
        assert losses_of(run) == losses_of(tmp_path / "none"), fault
        (note,) = notes
        log = (run / "log.txt").read_text()
        assert f"warning: {note}" in log
        assert log.splitlines()[-1].split()[2] == "done"


def test_failed_run_closes_its_trackers(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alone: None
) -> None:
    trackio = FakeTrackio(tmp_path, monkeypatch)

    def broken(self: Trainer, number: int, batch: Any) -> Any:
        if number == 3:
            raise RuntimeError("a fault")
        return step(self, number, batch)

    step = Trainer.step
    monkeypatch.setattr(Trainer, "step", broken)
    with pytest.raises(RuntimeError, match="a fault"):
        trained(tracked_recipe(data, "trackio"), tmp_path / "run")
    assert [call["step"] for call in trackio.calls("log")] == [1, 2, 2]
    assert trackio.calls()[-1]["call"] == "finish"


def test_missing_package_is_refused_with_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "wandb").mkdir()  # a folder that W&B wrote is no package
    monkeypatch.setattr(running, "find_spec", _only_in(tmp_path))
    for name in ("tensorboard", "wandb", "trackio"):
        with pytest.raises(RecipeError, match=rf"'{name}' is not installed: pip install -e '\.\[{name}\]'"):
            running.refuse_missing([name])
    with pytest.raises(RecipeError, match="unknown tracker 'mlflow': use tensorboard, wandb or trackio"):
        running.refuse_missing(["mlflow"])


def _only_in(folder: Path) -> Callable[[str], Any]:
    """Return a `find_spec` that looks for modules in `folder` alone."""
    return lambda name: PathFinder.find_spec(name, [str(folder)])
