"""Test vitpar on a GPU for the first time: correctness and speed, compared with predictions, part by part.

    make gpu-first-run                                    # all parts, the most important first
    make gpu-first-run PARTS="check vitpar"               # some of them
    python3 experiments/gpu_first_run.py --parts fp8 --out results
    python3 experiments/gpu_first_run.py --tiny --device cpu       # a rehearsal of all parts, in minutes

vitpar need not be installed, and neither git nor a network is needed. Python with torch, numpy and einops suffices to
measure the training step; missing packages are named in the first line, and parts that need them are left out. Each
part is stopped after --minutes (default 9), and --total-minutes limits the whole call. Every row is written to
results.json at once; report.md has all tables. Further calls add to the same folder. Exit code 1: a part failed or was
left out.

In a checkout without git, set the environment variable VITPAR_COMMIT to its commit.
"""

import argparse
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NoReturn

from bench.first_run import tables
from bench.first_run.parts import PARTS, PEERS, ROOT, Job, Part, environment, missing
from bench.first_run.results import Results
from bench.first_run.running import Running, last_json

LEAST_S = 15.0
"""Seconds that must be left to start another program."""


def main() -> int:
    """Run the parts and return the exit code: 1 if a part failed, 2 without a GPU."""
    signal.signal(signal.SIGTERM, stop)
    options = arguments()
    lacking = missing(tuple(dict.fromkeys(name for part in PARTS.values() for name in (*part.needs, *PEERS))))
    print(f"missing packages: {', '.join(lacking) or 'none'}", flush=True)
    if "torch" in lacking:
        return 1
    results = Results(options.out)
    facts = versions(options)
    for name, value in facts.items():
        print(f"- {name}: {value}", flush=True)
    if options.device == "cuda" and not facts["cuda"]:
        print("error: no CUDA device can be seen: run on a machine with a GPU, or rehearse with --tiny --device cpu")
        return 2
    results.call(facts | {"missing": ", ".join(lacking) or "nothing", "device": options.device})
    end = time.monotonic() + 60 * options.total_minutes
    fine = True
    try:
        for part in (PARTS[name] for name in options.parts):
            fine &= run(part, options, results, end)
    finally:
        print(f"\n{results.report()}\n{results.folder / 'report.md'} has these tables", flush=True)
    return 0 if fine else 1


def arguments() -> argparse.Namespace:
    """Parse and check the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        *("--parts",), nargs="+", choices=PARTS, default=list(PARTS), metavar="NAME", help=f"of: {', '.join(PARTS)}"
    )
    parser.add_argument(
        "--out", type=Path, default=ROOT / "gpu-first-run", metavar="DIR", help="folder of results (gpu-first-run)"
    )
    parser.add_argument("--minutes", type=float, default=9.0, metavar="N", help="time limit of a part (9)")
    parser.add_argument("--total-minutes", type=float, default=1e6, metavar="N", help="time limit of this call (none)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="tiny models, few steps: only to see the programs run")
    options = parser.parse_args()
    if options.device == "cpu" and not options.tiny:
        parser.error("--device cpu is for a rehearsal: add --tiny")
    return options


def versions(options: argparse.Namespace) -> dict[str, Any]:
    """Return the header, collected by another process so that this one uses no GPU memory."""
    command = [sys.executable, "-m", "bench.first_run.versions"]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=300)
    found = last_json(done.stdout.splitlines())
    if found is None:
        sys.exit(f"error: torch does not work here: {done.stderr.strip()[-2000:]}")
    return found | {"command": shlex.join(["python", *sys.argv])}


def run(part: Part, options: argparse.Namespace, results: Results, end: float) -> bool:
    """Run the programs of a part one after the other; return whether all of them ran and succeeded."""
    print(f"\n== {part.name}: {part.what}", flush=True)
    if lacking := missing(part.needs):
        results.keeper(part.name, part.name, "none")({"ended": f"left out: there is no {', '.join(lacking)}"})
        print(f"left out: there is no {', '.join(lacking)}", flush=True)
        return False
    fine, deadline = True, min(end, time.monotonic() + 60 * options.minutes)
    for job in part.jobs(options.tiny, options.device):
        left = deadline - time.monotonic()
        if left < LEAST_S:
            results.keeper(part.name, job.name, job.prediction)({"ended": f"left out: {max(0.0, left):.0f} s are left"})
            print(f"{job.name}: left out, {max(0.0, left):.0f} s are left", flush=True)
            fine = False
            continue
        fine &= start(part, job, left, results)
    return fine


def start(part: Part, job: Job, seconds: float, results: Results) -> bool:
    """Run one program, print its tables, and return whether it succeeded."""
    variables = "".join(f"{name}={value} " for name, value in job.environment.items())
    print(f"-- {job.name}: {variables}python {shlex.join(job.command)}\n   predicted: {job.prediction}", flush=True)
    keep = results.keeper(part.name, job.name, job.prediction, command=job.command, environment=job.environment)
    with tempfile.TemporaryDirectory() as folder:
        found = Running(job, seconds, Path(folder, "result.json"), results.log).wait(keep)
    keep(found)
    print("\n".join(["", *tables.lines(part.name, {job.name: results.newest(part.name)[job.name]})]), flush=True)
    return found["ended"] == "ended"


def stop(number: int, frame: object) -> NoReturn:
    """Signal handler that raises SystemExit, so that programs are killed and the report is written."""
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
