"""Measure whether step time and memory of a long run stay constant, and the cost of logging every step.

    python experiments/bench_steady.py                   # about 8 minutes on two cores
    python experiments/bench_steady.py --tiny            # seconds: does the program run?

- steady: `vitpar train` on digits, 2,000 steps of a small model without evaluation and checkpoints. Shows the medians
  of step time and resident memory for each window of 200 steps, and their rise from first to last step by a
  least-squares line, ± its standard error. The rise excludes the first window, in which memory is allocated.
- logging: the same run with train.log_every 1 and 100, as two processes in turns of --turn seconds. One is stopped
  while the other runs (SIGSTOP, SIGCONT), so that other work on the machine slows both alike. The steps/s of a turn are
  counted by the rows of metrics.jsonl.

Memory is the resident memory of the process (VmRSS), sampled twenty times per second.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from bench.header import header
from bench.steadiness import Slope, windows
from bench.timing import Spread, ratio

HERE = Path(__file__).resolve().parent
SETTINGS = {
    "model.embed_dim": 32,
    "model.depth": 2,
    "model.num_heads": 2,
    "train.batch_size": 32,
    "train.eval_every": 10**9,
    "checkpoint.every_steps": 0,
    "data.workers": 1,
}
WINDOW = 200
PARTS = 4  # memory samples of each part of a window are reduced to their median


def train(place: Path, run: str, steps: int, log_every: int, device: str) -> subprocess.Popen[bytes]:
    """Start `vitpar train` with one rank in the folder `place` and return the process, which is the rank itself."""
    words = ["--recipe", str(HERE / "digits.toml"), "--data", "digits", "--device", device, "--run-dir", run]
    words += ["--steps", str(steps), "--mesh", "dp1", "--set", f"train.log_every={log_every}"]
    for name, value in SETTINGS.items():
        words += ["--set", f"{name}={value}"]
    command = [sys.executable, "-m", "vitpar_cli.main", "train", *words]
    path = os.pathsep.join([str(HERE.parent / "src"), str(HERE.parent / "cli"), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(command, cwd=place, stdout=subprocess.DEVNULL, env={**os.environ, "PYTHONPATH": path})


def rows(run: Path) -> list[dict[str, Any]]:
    """Return the training rows of metrics.jsonl, without a last line that is still being written."""
    lines = (run / "metrics.jsonl").read_text().splitlines() if (run / "metrics.jsonl").exists() else []
    found = [json.loads(line) for line in lines if line.endswith("}")]
    return [row for row in found if row["kind"] == "train"]


def newest_step(run: Path) -> int:
    """Return the last step in metrics.jsonl, 0 if there is none."""
    path = run / "metrics.jsonl"
    if not path.exists():
        return 0
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 4096))
        whole = [line for line in file.read().split(b"\n")[1:-1] if b'"train"' in line]
    return json.loads(whole[-1])["step"] if whole else 0


def resident(pid: int) -> int | None:
    """Return the resident memory of a process in bytes, None if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("VmRSS:")), None)


def steady(arguments: argparse.Namespace, place: Path) -> tuple[Table, Any]:
    """Measure step time and memory of one long run: return the table and all measurements."""
    process = train(place, "steady", arguments.steps, 10, arguments.device)
    samples: list[tuple[int, int]] = []
    while process.poll() is None:
        memory, step = resident(process.pid), newest_step(place / "steady")
        if memory and step:
            samples.append((step, memory))
        time.sleep(0.05)
    if process.returncode:
        sys.exit(f"error: the run ended with exit code {process.returncode}")
    times = [row["step_ms"] for row in rows(place / "steady")]
    size = arguments.window
    table = Table("steps", "ms a step", "resident, MiB", box=box.MARKDOWN)
    memories = []
    for number, one in enumerate(windows(times, size)):
        here = [memory for step, memory in samples if number * size < step <= (number + 1) * size]
        memories.append(statistics.median(here) if here else None)
        table.add_row(
            f"{number * size + 1:,} to {(number + 1) * size:,}",
            Spread.of(one).text(2),
            f"{memories[-1] / 2**20:.2f}" if memories[-1] else "not seen",
        )
    # All steps of a log interval have the same time. Use one value per interval, or the error would be too small.
    time_slope = Slope.of(times[size::10])
    # Samples of memory that follow each other closely are not independent either.
    parts: dict[int, list[int]] = {}
    for step, memory in samples:
        parts.setdefault(step * PARTS // size, []).append(memory)
    memory_slope = Slope.of([statistics.median(part) for number, part in sorted(parts.items()) if number >= PARTS])
    table.add_row(f"rise after step {size}", time_slope.text(), memory_slope.text())
    return table, {
        "step_ms": times,
        "samples": samples,
        "time_rise": asdict(time_slope),
        "memory_rise": asdict(memory_slope),
    }


def logging(arguments: argparse.Namespace, place: Path) -> tuple[Table, Any]:
    """Compare the steps/s of logging every step with logging one step of a hundred."""
    often = {1: "every step", 100: "one of 100"}
    processes = {every: train(place, f"log{every}", 10**8, every, arguments.device) for every in often}
    rates: dict[int, list[float]] = {every: [] for every in often}
    try:
        while not all(newest_step(place / f"log{every}") > 100 for every in often):
            time.sleep(0.1)
            if any(process.poll() is not None for process in processes.values()):
                sys.exit("error: a run ended before its time")
        for process in processes.values():
            process.send_signal(signal.SIGSTOP)
        for number in range(arguments.turns):
            for every in list(often)[:: 1 if number % 2 else -1]:
                rates[every].append(_turn(processes[every], place / f"log{every}", arguments.turn))
    finally:
        for process in processes.values():
            process.send_signal(signal.SIGCONT)
            process.kill()
            process.wait()
    table = Table("logged", "steps/s", "time over that of one of 100", box=box.MARKDOWN)
    over = ratio(rates[100], rates[1]).text(3)
    for every, word in often.items():
        table.add_row(word, Spread.of(rates[every]).text(1), over if every == 1 else "1")
    return table, {f"steps_per_second_log_every_{every}": values for every, values in rates.items()}


def _turn(process: subprocess.Popen[bytes], run: Path, seconds: float) -> float:
    """Let the process run for a turn and return its steps/s.

    The time is taken from one new row to another, because rows are written in batches.
    """
    process.send_signal(signal.SIGCONT)
    time.sleep(min(0.2, seconds / 5))
    step, begun = _next_row(run)
    while time.perf_counter() - begun < seconds:
        time.sleep(0.001)
    last, ended = _next_row(run)
    process.send_signal(signal.SIGSTOP)
    return (last - step) / (ended - begun)


def _next_row(run: Path) -> tuple[int, float]:
    """Wait for a new row; return its step and the time when it was seen."""
    old = newest_step(run)
    while (step := newest_step(run)) == old:
        time.sleep(0.0005)
    return step, time.perf_counter()


TABLES = {"steady": steady, "logging": logging}


def main() -> int:
    """Read the options, measure, print tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=TABLES, metavar="TABLE", help=", ".join(TABLES))
    parser.add_argument("--steps", type=int, default=2000, help="of the steady run")
    parser.add_argument("--turns", type=int, default=12, help="of each run that is compared")
    parser.add_argument("--turn", type=float, default=10.0, metavar="SECONDS")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--tiny", action="store_true", help="few steps and short turns: only to see it run")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all that was measured")
    arguments = parser.parse_args()
    arguments.window = WINDOW
    if arguments.tiny:
        arguments.steps, arguments.window, arguments.turns, arguments.turn = 150, 50, 2, 0.5
    if arguments.steps < 3 * arguments.window:
        parser.error(f"--steps must be at least {3 * arguments.window}: three windows")
    facts, found = header(), {}
    facts["run"] = "digits, " + ", ".join(f"{name} {value}" for name, value in SETTINGS.items())
    console = Console(width=200, highlight=False)
    for name, value in facts.items():
        console.print(f"- {name}: {value}", soft_wrap=True)
    for name in arguments.only or TABLES:
        with tempfile.TemporaryDirectory() as folder, Console(stderr=True).status(f"{name} …"):
            place = Path(folder)
            pack = [sys.executable, "-m", "vitpar_cli.main", "data", "pack", "digits", "digits"]
            subprocess.run(pack, cwd=place, check=True, stdout=subprocess.DEVNULL)
            table, found[name] = TABLES[name](arguments, place)
        console.print(f"\n{name}\n")
        console.print(table)
    if arguments.json:
        arguments.json.write_text(json.dumps({"header": facts, **found}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
