"""`vitpar train --resume`: killed runs resume under other plans, signals save first, and misuse is refused."""

import json
import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest

from helpers.command_line import Refused, forked, run, started
from helpers.killed_runs import alive, lines, ranks_of, rows, wait_for
from helpers.shared_runs import shared_run
from vitpar.launch.stop_request import STOPPING

STEPS = 40


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with packed data, a recipe, and the uninterrupted run `through`."""
    folder = tmp_path_factory.mktemp("resume") / "place"
    shutil.copytree(shared_run("uninterrupted classify", tmp_path_factory), folder)
    return (folder / "run").rename(folder / "through").parent


def killed(place: Path, words: list[str], after: int, whom: str, draw: random.Random, saved: bool = False) -> None:
    """Start training and kill -9 one rank, or all processes, once metrics.jsonl has `after` more lines.

    The other processes must end by themselves.

    whom: "one rank" or "all"
    saved: also wait for a complete checkpoint before the kill
    """
    checkpoints = place / "run" / "checkpoints"
    begin = lines(place / "run")
    process = started(place, words)
    # A resumed run first drops the lines of the steps that it repeats.
    wait_for(lambda: lines(place / "run") >= begin + after, process)
    wait_for(lambda: not saved or any(path.suffix != ".partial" for path in checkpoints.glob("step_*")), process)
    there = ranks_of(process.pid)
    for victim in [process.pid, *there] if whom == "all" else [draw.choice(there)]:
        os.kill(victim, signal.SIGKILL)
    _, errors = process.communicate(timeout=60)
    assert process.returncode != 0, errors
    if whom != "all":
        assert "was killed by SIGKILL" in errors
    wait_for(lambda: not alive(there), process, ended=True)


@pytest.mark.parametrize("seed", [pytest.param(0, marks=pytest.mark.slow), pytest.param(1, marks=pytest.mark.soak)])
def test_killed_run_resumes_under_other_plans_with_the_same_losses(seed: int, place: Path) -> None:
    """The kill comes at a random step. Each start uses another mesh and another number of data workers."""
    draw = random.Random(seed)
    whom = ["one rank", "all"]
    (place / "run").rename(place / f"run-{seed}") if (place / "run").exists() else None
    begin = ["train", "--recipe", "recipe.toml", "--run-dir", "run", "--resume", "auto"]
    killed(place, [*begin, "--mesh", "pp2", "--microbatches", "2"], draw.randrange(2, 16), whom[seed], draw)
    first = rows(place / "run")
    more = ["--mesh", "fsdp2", "--set", "data.workers=0"]
    killed(
        place,
        ["train", "--resume", "auto", "--run-dir", "run", *more],
        draw.randrange(2, 10),
        whom[1 - seed],
        draw,
        saved=True,
    )
    done = run(place, ["train", "--resume", "run", "--mesh", "dp1", "--set", "data.workers=3"])
    assert done.returncode == 0, done.stderr
    assert "changed settings: data.workers was 0 and is 3; parallel.mesh was fsdp2 and is dp1" in done.stdout
    commands = json.loads((place / "run" / "env.json").read_text())["commands"]
    assert [words[-1] for _, words in commands][-2:] == ["data.workers=0", "data.workers=3"]
    through, ours = rows(place / "through"), rows(place / "run")
    assert ours.keys() == through.keys()
    for key, row in through.items():
        assert ours[key]["loss"] == pytest.approx(row["loss"], rel=1e-4), key
        assert ours[key]["samples"] == row["samples"]
        assert ours[key].get("samples_crc32") == row.get("samples_crc32")  # rows of evaluations have none
        if key in first:
            assert first[key]["loss"] == pytest.approx(row["loss"], rel=1e-4)
    assert not list((place / "run" / "checkpoints").glob("*.partial"))


@pytest.mark.parametrize(
    ("mesh", "number", "to"),
    [
        ("dp2", signal.SIGUSR1, "launcher"),
        pytest.param("dp2", signal.SIGTERM, "a rank", marks=pytest.mark.slow),
        pytest.param("dp1", signal.SIGINT, "launcher", marks=pytest.mark.slow),
    ],
)
def test_signal_saves_a_checkpoint_and_exits_with_75(mesh: str, number: signal.Signals, to: str, place: Path) -> None:
    """Schedulers send a signal before preemption. Exit code 75 tells the job script to queue the run again."""
    run_dir = place / f"asked-{mesh}-{number.name}-{to[0]}"
    words = ["train", "--recipe", "recipe.toml", "--mesh", mesh, "--steps", "20000", "--run-dir", run_dir.name]
    words += ["--set", "checkpoint.every=1000 epochs", "--set", "train.log_every=3"]
    # The children of a fork are the server's.
    process = forked(place, words) if to == "launcher" and number != signal.SIGINT else started(place, words)
    wait_for(lambda: lines(run_dir) > 5, process)
    target = process.pid if to == "launcher" else max(ranks_of(process.pid))
    os.kill(target, number)
    out, errors = process.communicate(timeout=60)
    assert process.returncode == 75, errors
    assert (STOPPING in errors) == (number == signal.SIGINT)
    (saved,) = (run_dir / "checkpoints").iterdir()
    assert saved.name == f"step_{max(step for _, step in rows(run_dir))}"
    by = {signal.SIGINT: "Ctrl-C"}.get(number, number.name if to == "launcher" else "a signal to another rank")
    said = f"stopped by {by} after step {saved.name[5:]}: `vitpar train --resume {run_dir.name}` resumes it"
    assert said in " ".join((out + errors).split())


@pytest.mark.slow
def test_second_signal_ends_the_run_at_once(place: Path) -> None:
    """The first signal waits for the end of a step. If no step ends, the user needs a way out."""
    words = ["train", "--recipe", "recipe.toml", "--mesh", "dp2", "--steps", "20000", "--run-dir", "twice"]
    process = started(place, [*words, "--set", "train.log_every=10000", "--set", "checkpoint.every=10000"])
    wait_for(lambda: lines(place / "twice") > 0, process)
    ranks = ranks_of(process.pid)
    os.kill(ranks[0], signal.SIGSTOP)  # no step can finish now
    for _ in range(2):
        os.kill(process.pid, signal.SIGINT)
        time.sleep(0.3)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130 and errors.endswith("stopped by Ctrl-C\n")
    wait_for(lambda: not alive(ranks), process, ended=True)


UNUSABLE = [
    (["--resume", "auto"], "--resume auto requires --run-dir: name the folder of the run"),
    (["--resume", "gone"], "--resume 'gone' is neither the folder of a run nor a checkpoint"),
    (["--resume", "data"], "--resume 'data' is neither the folder of a run nor a checkpoint"),
    (["--resume", "through", "--run-dir", "data"], "the run folder 'data' exists and is not empty"),
    (["--allow-change", "train.seed"], "--allow-change train.seed does nothing without --resume"),
    (["--resume", "through", "--data", "gone"], "no data set at 'gone'"),
    (["--resume", "through/checkpoints/step_7"], "is neither the folder of a run nor a checkpoint"),
    (["--resume", "begun"], "has no checkpoint to resume from: to start the run, use --resume auto --run-dir begun"),
    (["--resume", "away"], "is not in the folder of a run: name a new run folder with --run-dir"),
    (["--recipe", "recipe.toml", "--resume", "auto", "--run-dir", "."], "the run folder '.' exists and is not empty"),
]


def test_unusable_resume_options_are_refused_before_launch(place: Path, refused: Refused) -> None:
    shutil.copytree(place / "through" / "checkpoints" / f"step_{STEPS}", place / "away")
    (place / "begun").mkdir()
    shutil.copy(place / "recipe.toml", place / "begun")
    refused(place, UNUSABLE, "train")


def test_auto_resumes_a_run_and_changed_settings_are_refused(place: Path) -> None:
    auto = ["train", "--recipe", "recipe.toml", "--run-dir", "through", "--resume", "auto"]
    done = run(place, auto)  # the same command would start the run
    assert done.returncode == 0 and f"resuming from through/checkpoints/step_{STEPS}" in done.stdout, done.stderr
    done = run(place, ["train", "--resume", "through", "--set", "train.seed=3", "--mesh", "dp2"])
    assert done.returncode == 2
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    assert "train.seed was 0 and is 3" in done.stderr and "--allow-change train.seed" in done.stderr
