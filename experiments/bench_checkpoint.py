"""Measure the cost of saving a checkpoint, of resuming, and of being killed once a minute.

    python experiments/bench_checkpoint.py                     # about 25 minutes on two cores
    python experiments/bench_checkpoint.py --only saving

- saving: parameters and AdamW state of a ViT-S/16 under fsdp2. Measures how long training stalls, how long until the
  files are on the disk, their size, and how much longer three steps take while a checkpoint is written. Compares
  vitpar and torch.distributed.checkpoint (DCP), both synchronous and asynchronous, and `torch.save` of the gathered
  state. They take turns.
- restart: seconds from starting `vitpar train` to the end of its first step, for a fresh run and for a resumed one,
  taking turns. The model has the width and depth of ViT-S and trains on digits.
- goodput: a run that is killed once a minute and restarted at once, for ten minutes. Goodput is the share of the time
  spent on steps that were not lost to a kill.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from bench.header import header
from bench.save_rank import STEPS
from bench.timing import Spread, ratio
from vitpar.launch import spawn

HERE = Path(__file__).parent
WIDE = ["--set", "model.embed_dim=384", "--set", "model.depth=12", "--set", "model.num_heads=6"]


def saving(arguments: argparse.Namespace, place: Path) -> tuple[Table, Any]:
    """Compare the ways to save: return the table and all measurements."""
    path = os.pathsep.join([str(HERE), str(HERE.parent / "src"), os.environ.get("PYTHONPATH", "")])
    output = place / "saving.json"
    words = [arguments.model, "fsdp2", "8", str(arguments.rounds), str(place), str(output)]
    env = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    if spawn(2, ["-m", "bench.save_rank", *words], device="cpu", env=env):
        sys.exit(1)
    found = json.loads(output.read_text())
    step = statistics.median(found["alone"]) / STEPS
    heads = ("", "training waits, ms", "of 100 steps", "on the disk after, s", f"{STEPS} steps beside it", "MB")
    table = Table(*heads, box=box.MARKDOWN)
    for name, one in found["ways"].items():
        stall = Spread.of(one["stall"])
        table.add_row(
            name,
            Spread.of([1e3 * seconds for seconds in one["stall"]]).text(0),
            f"{stall.middle / (100 * step):.2%}",
            Spread.of(one["total"]).text(2),
            ratio(one["beside"], found["alone"]).text(2),
            f"{one['bytes'][0] / 1e6:.1f}",
        )
    table.add_row(f"a step: {1e3 * step:.0f} ms", *[""] * 4)
    return table, found


def train(place: Path, *words: str) -> subprocess.Popen[bytes]:
    """Start `vitpar train` on digits in the folder `place` and return the process.

    It leads its own process group, so that a kill reaches its ranks too.
    """
    recipe = [
        "--recipe",
        str(HERE / "digits.toml"),
        "--data",
        "digits",
        "--device",
        "cpu",
        "--set",
        "train.log_every=1",
    ]
    command = [sys.executable, "-m", "vitpar_cli.main", "train", *recipe, *words]
    return subprocess.Popen(command, cwd=place, stdout=subprocess.DEVNULL, start_new_session=True)


def pack(place: Path) -> None:
    """Pack digits into shards in the folder `place`, unless they are already there."""
    if not (place / "digits").exists():
        command = [sys.executable, "-m", "vitpar_cli.main", "data", "pack", "digits", "digits"]
        subprocess.run(command, cwd=place, check=True, stdout=subprocess.DEVNULL)


def rows(run: Path) -> list[dict[str, Any]]:
    """Return the training rows of metrics.jsonl, without a last line that is still being written."""
    lines = (run / "metrics.jsonl").read_text().splitlines() if (run / "metrics.jsonl").exists() else []
    found = [json.loads(line) for line in lines if line.endswith("}")]
    return [row for row in found if row["kind"] == "train"]


def restart(arguments: argparse.Namespace, place: Path) -> tuple[Table, Any]:
    """Compare the time to the first step of fresh and resumed runs: return the table and all measurements."""
    pack(place)
    always = ["--mesh", "fsdp2", "--set", "train.eval_every=1000", *WIDE]
    train(place, "--run-dir", "saved", "--steps", "2", *always).wait()
    found: dict[str, list[float]] = {"begins": [], "goes on": []}
    for number in range(arguments.rounds):
        for name in list(found)[:: 1 if number % 2 else -1]:
            run = place / "fresh"
            shutil.rmtree(run, ignore_errors=True)
            begun, done = time.perf_counter(), 0
            if name == "goes on":
                shutil.copytree(place / "saved", run)
                begun, done = time.perf_counter(), 2
            resume = ["--resume", "auto", "--run-dir", "fresh", "--steps", "1000", "--allow-change", "train.steps"]
            process = train(place, *resume, *always)
            while len(rows(run)) <= done and process.poll() is None:
                time.sleep(0.01)
            found[name].append(time.perf_counter() - begun)
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    size = sum(file.stat().st_size for file in (place / "saved" / "checkpoints" / "step_2").iterdir())
    table = Table("to the first step", "s", box=box.MARKDOWN)
    for name, seconds in found.items():
        table.add_row(f"a run that {name}", Spread.of(seconds).text(2))
    table.add_row("the second of the first", ratio(found["goes on"], found["begins"]).text(2))
    table.add_row("checkpoint, MB", f"{size / 1e6:.1f}")
    return table, found


def goodput(arguments: argparse.Namespace, place: Path) -> tuple[Table, Any]:
    """Measure the goodput of a run that is killed once a minute: return the table and all measurements."""
    pack(place)
    draw, run = random.Random(0), place / "killed"
    words = ["--mesh", "fsdp2", "--steps", "100000", "--run-dir", "killed", "--resume", "auto"]
    words += ["--set", "checkpoint.every_minutes=0.1", "--set", "train.eval_every=100000", *WIDE]
    begun, lost, kills = time.perf_counter(), [], 0
    pace: list[float] = []
    while kills < arguments.minutes:
        process = train(place, *words)
        minute = begun + 60 * kills
        end = minute + draw.uniform(20, 60) if kills + 1 < arguments.minutes else begun + 60 * arguments.minutes
        before = len(rows(run))
        while time.perf_counter() < end:
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        pace += [row["step_ms"] for row in rows(run)[before + 1 :]]
        kills += 1
        saved = max(
            (int(path.name[5:]) for path in run.glob("checkpoints/step_*") if path.name[5:].isdigit()), default=0
        )
        lost.append(rows(run)[-1]["step"] - saved)
    seconds = time.perf_counter() - begun
    useful = rows(run)[-1]["step"] - lost[-1]
    step = statistics.median(pace) / 1e3
    table = Table("", "", box=box.MARKDOWN)
    table.add_row("kills, in minutes", f"{kills} in {seconds / 60:.1f}")
    table.add_row("steps that count", f"{useful}")
    table.add_row("steps made again after a kill", " ".join(map(str, lost)))
    table.add_row("a step, ms (median)", f"{1e3 * step:.0f}")
    table.add_row("goodput", f"{useful * step / seconds:.1%}")
    return table, {"kills": kills, "seconds": seconds, "steps": useful, "lost": lost, "step_ms": pace}


TABLES = {"saving": saving, "restart": restart, "goodput": goodput}


def main() -> int:
    """Read the options, measure, print tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=TABLES, metavar="TABLE", help=", ".join(TABLES))
    parser.add_argument("--model", default="vit_small_patch16_224", help="that is saved")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--minutes", type=int, default=10, help="of goodput")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all that was measured")
    arguments = parser.parse_args()
    facts, found = header(), {}
    console = Console(width=200, highlight=False)
    for name, value in facts.items():
        console.print(f"- {name}: {value}", soft_wrap=True)
    for name in arguments.only or TABLES:
        with tempfile.TemporaryDirectory() as folder, Console(stderr=True).status(f"{name} …"):
            table, found[name] = TABLES[name](arguments, Path(folder))
        console.print(f"\n{name}\n")
        console.print(table)
    if arguments.json:
        arguments.json.write_text(json.dumps({"header": facts, **found}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
