"""Console output of `vitpar train`, on a terminal and in a file, and the sparkline of its loss."""

import io
import math
import time
from collections.abc import Iterator
from typing import Any

import pytest
from rich.console import Console

from vitpar.recipe import Recipe, read_recipe
from vitpar.recipe.defaults import recipe_for
from vitpar.strategy import validate
from vitpar.strategy.grammar import parse
from vitpar.tasks import task_of
from vitpar.training.events import Reporter, RunHeader, SettingsOrigin
from vitpar_cli.progress import ASCII, BLOCKS, COLUMNS, ConsoleReporter, Sparkline
from vitpar_cli.recipe_words import teacher_words

RECIPE = Recipe.model_validate(
    {
        "model": {"name": "vit_nano_patch2_8"},
        "data": {"path": "data shards/digits"},
        "train": {"batch_size": 128, "steps": 100, "precision": "fp32"},
    }
)


class Clock:
    """Clock that stands still until a test sets it."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


class Shown:
    """Reporter of a started run, whose methods return what was printed since the last call."""

    def __init__(self, *, terminal: bool, width: int = 80, quiet: bool = False) -> None:
        self.file, self.clock, self.device = io.StringIO(), Clock(), "cpu" if terminal else "cuda:0"
        console = Console(file=self.file, force_terminal=terminal, width=width, color_system=None, _environ={})
        self.reporter: Reporter = ConsoleReporter(console, self.clock, quiet)

    def start(
        self, recipe: Recipe = RECIPE, origin: SettingsOrigin = SettingsOrigin(), mesh: str = "pp2xtp2xdp2"
    ) -> str:
        config = recipe.config(10)
        plan = validate(parse(mesh), config, 128)
        self.reporter.started(
            RunHeader(
                recipe=recipe,
                task=task_of(recipe, 10),
                config=config,
                plan=plan,
                device=self.device,  # where the rough duration is measured, on a terminal
                parameters=901_234,
                state_bytes=4_200_000,
                train_samples=1437,
                val_samples=360,
                steps=100,
                folder="runs/one",
                origin=origin,
            )
        )
        return self.new()

    def step(self, number: int, seconds: float = 0.0) -> str:
        """Return the output of step `number`, `seconds` after the last event."""
        self.clock.now += seconds
        row = {"kind": "train", "step": number, "epoch": 0.89, "loss": 2.25, "lr": 0.00012}
        self.reporter.reached(number)
        self.reporter.stepped({**row, "images_per_second": 1234.5, "step_ms": 103.7, "data_ms": 0.31})
        return self.new()

    def evaluation(self, number: int) -> str:
        self.reporter.evaluated({"kind": "eval", "step": number, **RESULT})
        return self.new()

    def wait(self) -> str:
        """Return the output after the live line has been redrawn."""
        self.new()
        deadline = time.monotonic() + 30
        while not self.file.getvalue() and time.monotonic() < deadline:
            time.sleep(0.02)
        return self.new()

    def new(self) -> str:
        text = self.file.getvalue()
        self.file.seek(0)
        self.file.truncate()
        return text


RESULT: dict[str, Any] = {"samples": 360, "loss": 0.41, "top1": 0.9117, "top5": 0.9972}
SUMMARY = {**RESULT, "steps": 100, "images_per_second": 1200.4, "weights": "runs/one/weights"}


@pytest.fixture
def plain() -> Shown:
    return Shown(terminal=False)


@pytest.fixture
def live() -> Iterator[Shown]:
    shown = Shown(terminal=True)
    yield shown
    shown.reporter.finished(SUMMARY)


def test_header_describes_the_run(plain: Shown) -> None:
    lines = plain.start().splitlines()
    for line in (
        "model      vit_nano_patch2_8, 0.90 M parameters, 10 classes",
        "mesh       pp2xtp2xdp2 on 8 ranks of cuda",
        "           stage 1 │  4     6   │  5     7   │",
        "memory     4.2 MB per rank for parameters, gradients, adamw state in float32",
        "data       data shards/digits: 1,437 training and 360 validation images",
        "batch      128 images = 2 data-parallel parts x 64, each 4 micro-batches x 16",
        "steps      100 (8.9 epochs)",
        "run        runs/one",
    ):
        assert line in lines, line
    assert not [line for line in lines if line.startswith(("settings", "regularize", "kernels"))]
    lines = Shown(terminal=False).start(mesh="pp2: 0-3=tp2xdp2, *=dp4+ckpt").splitlines()
    assert "mesh       pp2: 0-3=tp2xdp2, *=dp4+ckpt on 8 ranks of cuda" in lines
    assert "pipeline   1f1b, in theory 20.0 % of the time idle" in lines
    named = {"data.path": "x", "train.steps": 1}
    taught = {"distill.teacher": "runs/one", "distill.kind": "logits", "distill.tau": 3, "distill.plan": "fsdp"}
    assert teacher_words(read_recipe(None, named | taught)) == "runs/one under fsdp: logits targets, alpha 0.5, tau 3"


def test_header_fits_a_terminal_and_names_the_trackers(live: Shown) -> None:
    settings = {"data.path": "x", "model.name": "vit_nano_patch2_8", "track.trackers": ["tensorboard", "wandb"]}
    live.new()
    words = live.start(recipe_for(50_000, settings).with_precision("bf16")).rpartition("\r\x1b[2K╭")[2]
    assert max(map(len, words.splitlines()[:-1])) <= 80
    assert "rand-m9-mstd0.5-inc1" in words  # lines break between words only
    assert "tensorboard, wandb (offline)" in words


def test_file_output_has_no_control_characters(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for variable in ("FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.setenv(variable, "1")
    shown = Shown(terminal=False)
    shown.reporter = ConsoleReporter()
    shown.start()
    shown.step(1)
    shown.evaluation(1)
    shown.reporter.finished(SUMMARY)
    printed = capsys.readouterr().out
    assert "top-1 91.2 %" in printed
    assert not [character for character in printed if ord(character) < 32 and character != "\n"]


def test_plain_lines_are_throttled_but_not_events(plain: Shown) -> None:
    plain.start()
    assert plain.step(1) == (
        "step 1/100  epoch 0.89  loss 2.2500  lr 0.00012  1,234 images/s  step 104 ms  data 0.3 ms  "
        "elapsed 0:00  ETA ?\n"
    )
    assert plain.step(10, 4) == plain.step(20, 5.9) == ""
    assert plain.step(21, 0.2).endswith("ETA 0:40\n")  # 20 steps took 10.1 s, and 79 remain
    assert plain.step(22, 9) == ""
    assert plain.step(100, 0.5).startswith("step 100/100  ")
    plain.reporter.evaluating(128, 360)
    plain.clock.now += 10
    plain.reporter.evaluating(256, 360)
    assert plain.new() == "evaluating 256/360 images\n"
    assert plain.evaluation(50) == "step 50  val loss 0.4100  top-1 91.2 %  top-5 99.7 %\n"
    plain.reporter.note("[8, 9] are odd labels " + "and " * 40)
    # Printed without rich markup and without wrapping.
    assert plain.new() == "warning: [8, 9] are odd labels " + "and " * 40 + "\n"
    plain.clock.now += 53.4
    plain.reporter.finished(SUMMARY)
    assert plain.new().splitlines() == [
        "done       1:23, 1,200 images/s on average",
        "loss       ▁▁▁▁▁  2.2500 to 2.2500",
        "result     val loss 0.4100  top-1 91.2 %  top-5 99.7 %",
        "weights    runs/one/weights",
        "evaluate   vitpar eval --checkpoint runs/one/weights --data 'data shards/digits'",
        "report     vitpar report runs/one",
    ]
    plain.reporter.finished({**SUMMARY, "images_per_second": None})  # a run of one step has no rate
    assert "images/s" not in plain.new()


def test_quiet_prints_messages_and_the_result() -> None:
    shown = Shown(terminal=True, quiet=True)
    assert shown.start() == shown.step(1) == shown.evaluation(1) == ""
    shown.reporter.note("an image is damaged")
    shown.reporter.finished(SUMMARY)
    lines = shown.new().splitlines()
    assert lines[0] == "warning: an image is damaged"
    assert "result     val loss 0.4100  top-1 91.2 %  top-5 99.7 %" in lines


def test_terminal_has_one_live_line_below_permanent_ones(live: Shown) -> None:
    show, hide = "\x1b[?25h", "\x1b[?25l"
    begin = live.new()
    assert begin.rfind(show) > begin.rfind(hide) >= 0  # a killed process cannot restore the cursor
    assert "making the model  0:00" in live.wait()
    header = live.start()
    assert max(map(len, header.replace("\x1b[2K", "").splitlines()[:-1])) <= 80
    assert "│ time       about " in header
    live.clock.now += 46
    assert "computing the first step  0:46" in live.wait()
    drawn = live.step(10, 1)
    assert "\n" not in drawn and hide not in drawn
    line = drawn.rsplit("\x1b[2K", 1)[-1]
    assert line.rstrip().endswith("10/100  loss 2.2500  1,234 images/s  elapsed 0:47  ETA ?")
    assert line.startswith("━╸" + " " * 16 + "10/100") and len(line) <= 80
    permanent, redrawn = live.evaluation(10).rsplit("\n", 1)
    assert permanent.endswith("step 10  val loss 0.4100  top-1 91.2 %  top-5 99.7 %")
    assert "loss 2.2500" in redrawn and hide not in permanent + redrawn
    # Steps without a row move the line; a thread redraws it while this one computes.
    live.clock.now += 2
    live.reporter.reached(11)
    assert "  11/100  loss 2.2500  1,234 images/s  elapsed 0:49  ETA 2:58" in live.wait()
    live.reporter.finished(SUMMARY)
    assert hide not in live.new()


def test_the_live_line_fits_the_terminal_and_keeps_the_remaining_time() -> None:
    for width, words in (
        (60, "10/100  loss 2.2500  1,234 images/s  elapsed 0:02  ETA 0:18"),
        (120, "10/100  epoch 0.89  loss 2.2500  lr 0.00012  1,234 images/s  data 0.3 ms  elapsed 0:02  ETA 0:18"),
    ):
        shown = Shown(terminal=True, width=width)
        shown.start()
        shown.step(1)
        line = shown.step(10, 1.8).rsplit("\x1b[2K", 1)[-1].rstrip()
        shown.reporter.finished(SUMMARY)
        assert line.endswith(words) and len(line) <= width


def line_of(steps: int, values: list[float | None], encoding: str = "utf-8") -> str | None:
    line = Sparkline(steps)
    for step, value in enumerate(values, start=1):
        line.add(step, value)
    return line.words(encoding)


def test_the_sparkline_shows_means_of_equal_parts_and_skips_steps_without_a_value() -> None:
    down = [7, 6, 5, 4, 3, 2, 1, 0]
    for encoding, levels in (("utf-8", BLOCKS), ("ascii", ASCII), ("no such", ASCII)):
        assert line_of(8, down, encoding) == f"{levels[::-1]}  7.0000 to 0.0000"
    values = [0.0, 2.0] * COLUMNS + [9.0] * 2 * COLUMNS  # 4 steps a column
    assert line_of(4 * COLUMNS, values) == f"{'▁' * 20}{'█' * 20}  0.0000 to 9.0000"
    assert line_of(4, [1.0, None, math.inf, 0.5]) == "█▁  1.0000 to 0.5000"
    resumed = Sparkline(COLUMNS)
    for step in (30, 31, 40, 41):
        resumed.add(step, float(step))
    assert resumed.words() == "▁▂█  30.0000 to 41.0000"
    assert line_of(100, [2.0]) is None and line_of(100, []) is None
    assert line_of(3, [2.0, 2.0, 2.0]) == "▁▁▁  2.0000 to 2.0000"
