"""Compare the losses of one recipe under several plans, or of one plan under two versions of the source.

    python experiments/same_losses.py --plans pp2xtp2xdp2 tp2xfsdp2 pp4 dp1 --steps 200 --compare 50 \
        --recipe experiments/cifar10.toml --data data_shards/cifar10
    python experiments/same_losses.py --plans dp1 fsdp4+ckpt --steps 8 --json before.json …
    PYTHONPATH=OTHER/src:OTHER/cli python experiments/same_losses.py … --json after.json --before before.json

Trains --steps steps under each plan with `vitpar train`, and takes as long as these runs. Prints the largest absolute
difference of each plan's losses from those of the last plan, for the first --compare steps and for all. With --before,
the exit code is 1 if any bit of a loss or gradient norm differs from that file's: record both on the same machine.
Unknown options (--set, --model, …) are passed to `vitpar train`.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from bench.harness import Report, parser

Steps = list[list[float]]
"""Loss and gradient norm of each step."""


def trained(plan: str, folder: Path, steps: int, options: list[str]) -> Steps:
    """Train under `plan` and return what every step logged."""
    print(f"training {steps} steps under {plan}", file=sys.stderr, flush=True)
    run_dir = Path(tempfile.mkdtemp(dir=folder))
    command = [sys.executable, "-m", "vitpar_cli.main", "train", "--mesh", plan, "--steps", str(steps), *options]
    words = ["--run-dir", str(run_dir), "--set", "train.log_every=1"]
    done = subprocess.run([*command, *words], stdout=subprocess.DEVNULL, check=False)
    if done.returncode:
        sys.exit(done.returncode)  # the command printed the reason
    rows = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [[row["loss"], row["grad_norm"]] for row in rows if row["kind"] == "train"]


def main() -> int:
    """Read the options, train under each plan, print the table of differences and return the exit code."""
    made = parser(__doc__)
    made.add_argument("--plans", nargs="+", required=True, metavar="PLAN", help="the last one is compared with")
    made.add_argument("--steps", type=int, default=200)
    made.add_argument("--compare", type=int, default=50, help="steps the first column looks at")
    made.add_argument("--before", type=Path, metavar="FILE", help="what another version wrote with --json")
    given, options = made.parse_known_args()
    report = Report(given.json)
    with tempfile.TemporaryDirectory() as folder:
        runs = {plan: trained(plan, Path(folder), given.steps, options) for plan in given.plans}
    rows = []
    for plan, run in runs.items():
        apart = [abs(a - b) for (a, _), (b, _) in zip(run, runs[given.plans[-1]], strict=True)]
        largest = (f"{max(apart[: given.compare]):.1e}", f"{max(apart):.1e}")
        rows.append([plan, *largest, f"{run[0][0]:.6f}", f"{run[-1][0]:.6f}"])
    heads = ("plan", f"first {given.compare} steps", f"all {given.steps} steps", "loss at step 1", "at the end")
    report.show("runs", heads, rows, runs)
    before = json.loads(given.before.read_text())["runs"] if given.before else runs
    different = [plan for plan, run in runs.items() if before.get(plan) != run]
    print("".join(f"{plan}: not the same as before\n" for plan in different), end="")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
