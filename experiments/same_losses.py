"""Compare the losses of one recipe under several plans.

    python experiments/same_losses.py --plans pp2xtp2xdp2 tp2xfsdp2 pp4 dp1 --steps 200 --compare 50 \
        --recipe experiments/cifar10.toml --data data_shards/cifar10

Trains --steps steps under each plan with `vitpar train`, and takes as long as these runs. Prints the largest absolute
difference of each plan's losses from those of the last plan, for the first --compare steps and for all. Unknown options
(--set, --model, …) are passed to `vitpar train`.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path


def losses(plan: str, folder: Path, steps: int, options: list[str]) -> list[float]:
    """Train under `plan` and return the training loss of every step."""
    run_dir = folder / plan
    command = [sys.executable, "-m", "vitpar_cli.main", "train", "--mesh", plan, "--steps", str(steps)]
    done = subprocess.run([*command, "--run-dir", str(run_dir), *options], stdout=subprocess.DEVNULL, check=False)
    if done.returncode:
        sys.exit(done.returncode)  # the command printed the reason
    rows = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [row["loss"] for row in rows if row["kind"] == "train"]


def main() -> None:
    """Read the options, train under each plan, and print the table of differences."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--plans", nargs="+", required=True, metavar="PLAN", help="strategy strings; the last one is compared with"
    )
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--compare", type=int, default=50, help="steps the first column looks at")
    arguments, options = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        runs = {}
        for plan in arguments.plans:
            print(f"training {arguments.steps} steps under {plan}", file=sys.stderr, flush=True)
            runs[plan] = losses(plan, Path(folder), arguments.steps, options)
    reference = arguments.plans[-1]
    print(f"| plan | first {arguments.compare} steps | all {arguments.steps} steps | loss at step 1 | at the end |")
    print("|---|---|---|---|---|")
    for plan, run in runs.items():
        apart = [abs(a - b) for a, b in zip(run, runs[reference], strict=True)]
        print(f"| {plan} | {max(apart[: arguments.compare]):.1e} | {max(apart):.1e} | {run[0]:.6f} | {run[-1]:.6f} |")


if __name__ == "__main__":
    main()
