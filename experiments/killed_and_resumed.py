"""Kill a run repeatedly, resume it under another plan each time, and compare its losses with an uninterrupted run.

    python experiments/killed_and_resumed.py --plans pp2xtp2xdp2 fsdp4 dp1 --workers 2 0 1 \
        --recipe experiments/cifar10.toml --data data_shards/cifar10 --steps 120 --set checkpoint.every_steps=10

First trains without interruption under the last plan. Then trains a second run under each plan in turn, and kills all
processes of each but the last at a random step (--seed). Prints at which step each plan began and was killed, and how
much its losses and the last evaluation differ from the uninterrupted run. It takes as long as two such runs. Unknown
options are passed to `vitpar train`. Exit code 1: a loss differs by more than 1e-4 (relative).
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench.header import header

TRAIN = [sys.executable, "-m", "vitpar_cli.main", "train"]
Row = dict[str, float]


def rows(run: Path) -> dict[tuple[str, int], Row]:
    """Return the rows of metrics.jsonl by (kind, step), without a last line that is incomplete."""
    lines = (run / "metrics.jsonl").read_text().splitlines() if (run / "metrics.jsonl").exists() else []
    found = (json.loads(line) for line in lines if line.endswith("}"))
    return {(row["kind"], row["step"]): row for row in found}


def last_step(run: Path) -> int:
    """Return the last step in metrics.jsonl, 0 if there is none."""
    return max((step for _, step in rows(run)), default=0)


def killed(command: list[str], run: Path, step: int) -> int:
    """Train until `step` is logged, kill all processes at once, and return the last step that was logged."""
    begun = last_step(run)
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)
    while process.poll() is None and (last_step(run) < step or last_step(run) == begun):
        time.sleep(0.02)
    if process.returncode is not None:
        sys.exit(f"the run ended at step {last_step(run)}, before it was killed at {step}: give more --steps")
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    return last_step(run)


def main() -> int:
    """Read the options, train, kill, resume, compare and print; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plans", nargs="+", required=True, metavar="PLAN", help="strategy strings, in turn")
    parser.add_argument("--workers", nargs="+", type=int, default=[2], help="decoding threads, in turn")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--seed", type=int, default=0, help="of the steps at which runs are killed")
    arguments, options = parser.parse_known_args()
    plans, steps, draw = arguments.plans, arguments.steps, random.Random(arguments.seed)
    always = ["--steps", str(steps), "--set", "train.log_every=1", *options]
    with tempfile.TemporaryDirectory() as folder:
        through, run = Path(folder, "through"), Path(folder, "run")
        print(f"training {steps} steps under {plans[-1]}, which is not killed", file=sys.stderr, flush=True)
        subprocess.run(
            [*TRAIN, "--mesh", plans[-1], "--run-dir", str(through), *always], stdout=subprocess.DEVNULL, check=True
        )
        expected, table = rows(through), []
        share = steps // len(plans)
        for turn, plan in enumerate(plans):
            workers = arguments.workers[turn % len(arguments.workers)]
            words = ["--mesh", plan, "--run-dir", str(run), "--resume", "auto", "--set", f"data.workers={workers}"]
            command = [*TRAIN, *words, *always]
            saved = (int(path.name[5:]) for path in run.glob("checkpoints/step_*") if path.name[5:].isdigit())
            begins = max(saved, default=0)
            if turn < len(plans) - 1:
                print(f"training under {plan}, to be killed", file=sys.stderr, flush=True)
                ends = killed(command, run, draw.randrange(turn * share + share // 2, (turn + 1) * share))
            else:
                print(f"training under {plan} to the end", file=sys.stderr, flush=True)
                subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
                ends = steps
            apart = {
                key: abs(row["loss"] / expected[key]["loss"] - 1) for key, row in rows(run).items() if key[1] > begins
            }
            killed_at = f"killed at {ends}" if ends < steps else f"done at {ends}"
            table.append(f"| {plan} | {workers} | {begins} | {killed_at} | {max(apart.values()):.1e} |")
        ours = rows(run)
        for name, value in header().items():
            print(f"- {name}: {value}")
        print("\n| plan | workers | begins after step | | losses apart, at most, relative |\n|---|---|---|---|---|")
        print("\n".join(table))
        worst = max(abs(ours[key]["loss"] / row["loss"] - 1) for key, row in expected.items())
        evaluated = [found["eval", steps]["top1"] for found in (expected, ours)]
        print(f"\nAll {steps} steps: {worst:.1e} at most. Top-1 at the end: {evaluated[0]:.2%} and {evaluated[1]:.2%}.")
    return 0 if worst < 1e-4 and ours.keys() == expected.keys() else 1


if __name__ == "__main__":
    sys.exit(main())
