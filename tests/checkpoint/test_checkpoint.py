"""Retention of checkpoints, the choice of the one to resume from, and rejection of damaged ones."""

import os
import re
import resource
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from helpers.ranks import Ranks
from helpers.trained import CPU, STEPS, changed, recipe_of, rows, train, trainer_of
from vitpar.checkpoint import atomic
from vitpar.checkpoint.folder import Checkpoint, Checkpoints
from vitpar.errors import CheckpointError, RecipeError
from vitpar.intervals import EPOCH
from vitpar.recipe import Recipe
from vitpar.training.evaluate import Evaluation, evaluate
from vitpar.training.saving.resume import find

# bad checkpoints


@pytest.fixture(scope="module")
def trained(data: Path, tmp_path_factory: pytest.TempPathFactory, ranks: Ranks) -> Path:
    """Train in one process with checkpoints at steps 3 and 6, and return the run's folder."""
    run = tmp_path_factory.mktemp("trained") / "run"
    ranks(1).run(train, recipe_of(data, "dp1"), run)
    return run


@pytest.fixture
def run(trained: Path, tmp_path: Path, alone: None) -> Path:
    """Return a copy of the trained run, in a process that can resume it."""
    return Path(shutil.copytree(trained, tmp_path / "run"))


def flip(path: Path, name: str = "shard-00001-of-00001.safetensors") -> None:
    content = bytearray((path / name).read_bytes())
    content[len(content) // 2] ^= 1
    (path / name).write_bytes(content)


def stated(path: Path, text: str) -> None:
    """Replace state.json, with matching checksums."""
    (path / "state.json").unlink()
    stored = atomic.write(path / "state.json", text.encode())
    changed(path, lambda index: index.files.__setitem__("state.json", stored))


SHARD, BIAS = "shard-00001-of-00001.safetensors", "model.head.fc.bias"
SPOILS: list[tuple[Callable[[Path], Any], str]] = [
    (lambda path: os.truncate(path / SHARD, 1000), "has .* bytes instead of .*"),
    (flip, "has a wrong checksum"),
    (lambda path: flip(path, "index.json"), "index.json"),
    (lambda path: flip(path, "state.json"), "state.json"),
    (lambda path: (path / SHARD).unlink(), "No such file"),
    (lambda path: changed(path, lambda i: i.tensors[BIAS].parts.clear()), "do not fill"),
    (lambda path: stated(path, '{"step": -1, "samples": 1, "data": ""}'), "state.json"),
]


def test_older_checkpoint_is_used_if_the_newest_is_damaged(trained: Path, tmp_path: Path, alone: None) -> None:
    for number, (spoil, words) in enumerate(SPOILS):
        run = Path(shutil.copytree(trained, tmp_path / str(number)))
        newest = run / "checkpoints" / f"step_{2 * STEPS}"
        warnings: list[str] = []
        found = find(run, warnings.append)
        assert found and found.facts.step == 2 * STEPS and not warnings
        spoil(newest)
        found = find(run, warnings.append)
        assert found and found.facts.step == STEPS
        (warning,) = warnings
        assert str(newest) in warning and "resuming from an older checkpoint" in warning
        with pytest.raises(CheckpointError, match=words) as caught:
            find(newest, warnings.append)  # a checkpoint that the user names is used or refused, never replaced
        assert "\n" not in str(caught.value)


def test_run_with_only_damaged_checkpoints_does_not_start_anew(run: Path, data: Path) -> None:
    """A fresh start would replace the metrics and checkpoints of the run."""
    before = rows(run)
    for path in (run / "checkpoints").iterdir():
        os.truncate(path / SHARD, 1000)
    with pytest.raises(CheckpointError, match=f"step_{STEPS}' is damaged"):
        trainer_of(recipe_of(data, "dp1"), run, resume=run)
    assert rows(run) == before and len(list((run / "checkpoints").iterdir())) == 2


def test_leftovers_of_a_killed_run_are_not_checkpoints(run: Path, trained: Path, data: Path) -> None:
    there = run / "checkpoints"
    (there / f"step_{2 * STEPS}").rename(there / f"step_{2 * STEPS}.partial")
    cut_index = (there / f"step_{2 * STEPS}.partial" / "index.json").read_bytes()[:-1]
    (there / f"step_{2 * STEPS}.partial" / "index.json").write_bytes(cut_index)
    shutil.copytree(there / f"step_{STEPS}", there / "step_1.removed")
    found = find(run, pytest.fail)
    assert found and found.facts.step == STEPS
    Checkpoints(there).clear()
    assert [path.name for path in there.iterdir()] == [f"step_{STEPS}"]
    trainer = trainer_of(recipe_of(data, "dp1"), run, resume=run)
    with pytest.raises(RecipeError, match="still running"):
        trainer_of(recipe_of(data, "dp1"), run, resume=run)
    # The process died between the two renames of a replacement: the new checkpoint is complete and takes its place.
    there = Checkpoints(there)
    there.path(STEPS).rename(atomic.removed(there.path(STEPS)))
    shutil.copytree(trained / "checkpoints" / f"step_{2 * STEPS}", atomic.partial(there.path(STEPS)))
    there.clear()
    assert [path.name for path in there.folder.iterdir()] == [f"step_{STEPS}"]
    assert Checkpoint.open(there.path(STEPS)).facts.step == 2 * STEPS
    trainer.run()
    assert there.steps() == [STEPS, 2 * STEPS]


def test_newer_checkpoints_stay_until_the_resumed_run_saves(run: Path, data: Path) -> None:
    """Resuming from step 3 makes the checkpoint of step 6 obsolete, but it must survive until the new run has saved."""
    there = Checkpoints(run / "checkpoints")
    trainer = trainer_of(recipe_of(data, "dp1"), run, resume=there.path(STEPS))
    assert there.steps() == [STEPS, 2 * STEPS]
    trainer.saver.save(STEPS + 1, (STEPS + 1) * 24)
    trainer.saver.finish()
    assert there.steps() == [STEPS, STEPS + 1]
    trainer.run()


def test_run_without_checkpoints_starts_anew(data: Path, tmp_path: Path, alone: None) -> None:
    recipe = recipe_of(data, "dp1", **{"checkpoint.every": 0})
    train(CPU, recipe, tmp_path / "run", resume=tmp_path / "run", allow_change=["train.seed"])
    assert not (tmp_path / "run" / "checkpoints").exists()
    train(CPU, recipe, tmp_path / "run", resume=tmp_path / "run")
    assert [row["step"] for row in rows(tmp_path / "run")] == list(range(1, 2 * STEPS + 1))


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({}, [2, 3]),  # the default is every epoch, here 35 images in batches of 20
        ({"every": "2 epochs"}, [3]),
        ({"every": "0 epochs"}, []),
        ({"every": "1e-9 minutes"}, [1, 2, 3]),
        ({"every": "60 minutes", "first": True}, [1, 3]),
        ({"every": 1, "keep": 2, "keep_every_steps": 3, "steps": 8}, [3, 6, 7, 8]),
    ],
    ids=str,
)
def test_settings_determine_when_checkpoints_are_written_and_kept(
    settings: dict[str, Any], steps: list[int], data: Path, tmp_path: Path, alone: None
) -> None:
    values = {f"checkpoint.{key}": value for key, value in settings.items() if key != "steps"}
    values |= {"train.steps": settings.get("steps", 3), "train.batch_size": 20}
    recipe = recipe_of(data, "dp1", **values)
    if not settings:
        recipe = recipe.model_copy(update={"checkpoint": recipe.checkpoint.model_copy(update={"every": EPOCH})})
    train(CPU, recipe, tmp_path / "run")
    assert Checkpoints(tmp_path / "run" / "checkpoints").steps() == steps


def test_best_checkpoint_is_kept(data: Path, tmp_path: Path, alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    rates = iter([0.1, 0.5, 0.5, 0.3, 0.4, 0.2])

    def rated(*args: Any) -> Evaluation:
        result = evaluate(*args)
        return replace(result, metrics={**result.metrics, "top1": next(rates)})

    monkeypatch.setattr("vitpar.training.trainer.evaluate", rated)
    best = {"checkpoint.every": 4, "checkpoint.keep": 1, "checkpoint.keep_best": True, "train.eval_every": 1}
    recipe = recipe_of(data, "dp1", **best)
    trainer = trainer_of(recipe, tmp_path / "run")
    trainer.total_steps = 4
    trainer.run()
    there = Checkpoints(tmp_path / "run" / "checkpoints")
    assert there.steps() == [2, 4]
    train(CPU, recipe, tmp_path / "run", resume=tmp_path / "run")  # the best result survives the resumption
    assert there.steps() == [2, 6]


def test_model_settings_may_change_if_allowed_unless_they_have_parameters(
    run: Path, data: Path, tmp_path: Path
) -> None:
    recipe = recipe_of(data, "dp1", **{"model.init": "jax", "model.norm_eps": 1e-5})
    with pytest.raises(CheckpointError, match=r"--allow-change model\.norm_eps --allow-change model\.init$"):
        trainer_of(recipe, tmp_path / "on", resume=run)
    trainer_of(recipe, tmp_path / "on", resume=run, allow_change=["model.init", "model.norm_eps"])
    with pytest.raises(CheckpointError, match=r"model\.embed_dim was 24 and is 48: change them back$"):
        trainer_of(recipe_of(data, "dp1", **{"model.embed_dim": 48}), run, resume=run, allow_change=["model.embed_dim"])
    recipe = recipe_of(data, "dp1", **{"train.batch_size": 12, "train.steps": 14})
    with pytest.raises(CheckpointError, match="name another folder with --run-dir"):
        trainer_of(recipe, run, resume=run, allow_change=["train.batch_size", "train.steps"])


def opened(device: torch.device, paths: list[Path]) -> str:
    """Return this rank's error for a checkpoint that each rank has at a path of its own."""
    try:
        return str(Checkpoint.open_whole(paths[dist.get_rank()]).facts.step)
    except CheckpointError as error:
        return str(error)


def test_ranks_do_not_resume_from_different_checkpoints(trained: Path, ranks: Ranks) -> None:
    first, last = (trained / "checkpoints" / f"step_{step}" for step in (3, 6))
    assert len({*ranks(3).run(opened, [last] * 3)}) == 1
    for error in ranks(3).run(opened, [last, last, first]):
        assert re.match(r"rank 2 found another checkpoint at '.*' than rank 0: copy one to all machines", error)


# changed settings


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"train.ema_decay": None}, "train.ema_decay was 0.9 and is not set"),
        ({"train.batch_size": 12}, "train.batch_size was 24 and is 12"),
        ({"optimizer.name": "muon"}, "optimizer.name was adamw and is muon"),
    ],
)
def test_changed_training_settings_must_be_allowed(
    changed: dict[str, Any], words: str, run: Path, data: Path, tmp_path: Path
) -> None:
    """A changed setting alters the result, so it must be intended. With --allow-change the sample count continues."""
    steps = {"train.steps": 14 if "train.batch_size" in changed else 2 * STEPS + 1}
    recipe = recipe_of(data, "dp1", **steps, **changed)
    if "train.ema_decay" in changed:
        recipe = recipe.model_copy(update={"train": recipe.train.model_copy(update={"ema_decay": None})})
    with pytest.raises(CheckpointError, match=words):
        trainer_of(recipe, tmp_path / "other", resume=run)
    train(CPU, recipe, tmp_path / "other", resume=run, allow_change=[*changed, "train.steps"])
    first = rows(tmp_path / "other")[0]
    batch = changed.get("train.batch_size", 24)
    assert first["samples"] == 2 * STEPS * 24 + batch and first["step"] == 2 * STEPS * 24 // batch + 1


def test_changed_data_must_be_allowed(run: Path, data: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(data, tmp_path / "packed"))  # the same data elsewhere
    trainer_of(recipe_of(other, "dp1"), tmp_path / "same", resume=run)
    found = Checkpoint.open(run / "checkpoints" / f"step_{STEPS}")
    stated(found.path, found.facts.model_copy(update={"data": "another"}).model_dump_json())
    with pytest.raises(CheckpointError, match="the training set differs"):
        trainer_of(recipe_of(data, "dp1"), tmp_path / "other", resume=found.path)
    train(CPU, recipe_of(data, "dp1"), tmp_path / "other", resume=found.path, allow_change=["data"])


# write errors


def full_disk(device: torch.device, recipe: Recipe, run_dir: Path) -> str:
    """Train with a rank 1 that cannot write large files after its first checkpoint; return the error of each rank."""
    trainer = trainer_of(recipe, run_dir)
    save, limits = trainer.saver.save, resource.getrlimit(resource.RLIMIT_FSIZE)

    def saved(step: int, samples: int) -> None:
        if step > STEPS:
            trainer.saver.finish()  # the first checkpoint, which is written while training continues
        if step > STEPS and dist.get_rank() == 1:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
        save(step, samples)

    trainer.saver.save = saved  # type: ignore[method-assign]
    try:
        trainer.run()
    except CheckpointError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    return "trained"


def test_full_disk_ends_the_run_and_keeps_the_last_checkpoint(data: Path, tmp_path: Path, ranks: Ranks) -> None:
    for answer in ranks(2).run(full_disk, recipe_of(data, "fsdp2"), tmp_path / "run"):
        assert "step_6' cannot be written (rank 1: " in answer and "File too large" in answer
    there = tmp_path / "run" / "checkpoints"
    assert [path.name for path in there.iterdir()] == ["step_3"]
