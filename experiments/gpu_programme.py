"""Prepare, run and report a programme of measurements for short use of one GPU.

    make gpu-bundle PROGRAMME=A CIFAR=PATH/TO/cifar10         # here: wheels, data, and the commands of the calls
    make gpu-bundle PROGRAMME=A CIFAR=… REHEARSE=1            # here: run them on the CPU, tiny, as they will run there
    python3 experiments/gpu_programme.py run A --call 1 --out OUT      # there: one of these commands
    python experiments/gpu_programme.py report OUT1 OUT2      # here: experiments/results/gpu_<card>_<date>.md
    python experiments/gpu_refit.py OUT1                      # here: the planner's rates from the measurements

The machine with the GPU needs no git, no network and no installation of vitpar: a copy of the checkout with the folder
gpu-bundle, Python 3.12 with torch 2.11, Triton 3.6 and the packages that `bundle` lists. On a machine of your own with
vitpar installed, `run` alone suffices.

A program is stopped at its time limit; the limits of a call add up to at most 10 minutes, those of a programme to 20.
Measurements are kept in OUT/results.json as they are made. Exit code 1: a program failed or was stopped.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path
from typing import Any, NoReturn

from bench import work_tree
from bench.programme.programmes import PROGRAMMES, ROOT

BUNDLE = ROOT / "gpu-bundle"
PATIENCE = 6
"""Time limits in a rehearsal, relative to those on a GPU: compiling and checking take long on a small machine."""


def main() -> int:
    """Read the command line, do it and return the exit code."""
    options = arguments()
    try:
        return {"bundle": bundle, "rehearse": rehearse, "run": run, "report": report}[options.what](options)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except subprocess.CalledProcessError:
        print(f"error: git cannot list the files of '{ROOT}': use a clone of the repository", file=sys.stderr)
        return 2


def arguments() -> argparse.Namespace:
    """Parse and check the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="what", required=True, metavar="COMMAND")
    making = commands.add_parser("bundle", help="make the folder that travels, and print the commands")
    making.add_argument("--cifar", type=Path, metavar="SOURCE", help="CIFAR-10, as vitpar data pack reads it")
    trying = commands.add_parser("rehearse", help="run the printed commands in a copy of the checkout, on the CPU")
    trying.add_argument("--python", default="python3.12", metavar="FILE", help="a Python 3.12 (python3.12)")
    running = commands.add_parser("run", help="run a call")
    running.add_argument("--call", type=int, default=1, metavar="N", help="number of the call (1)")
    running.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder of results")
    running.add_argument("--rehearse", action="store_true", help="on the CPU, with tiny models")
    for command in (making, trying, running):
        command.add_argument("programme", choices=PROGRAMMES, help=f"of: {', '.join(PROGRAMMES)}")
    telling = commands.add_parser("report", help="write the report of results")
    telling.add_argument("folders", type=Path, nargs="+", metavar="OUT", help="folders of the calls, in order")
    telling.add_argument(
        "--to", type=Path, metavar="DIR", help="folder for the report and raw JSON; printed without it"
    )
    return parser.parse_args()


def bundle(options: argparse.Namespace) -> int:
    """Make the bundle, check the sizes and print what each call carries and runs."""
    from bench.header import header
    from bench.programme import bundle as making

    print(f"downloading {len(making.PACKAGES)} wheels", flush=True)
    making.download_wheels(ROOT / "constraints.txt")
    if options.cifar:
        print("packing CIFAR-10", flush=True)
        making.pack_cifar(options.cifar)
    commit, _, changed = header()["commit"].partition(" ")
    print(f"The machine needs Python {making.PYTHON} with {', '.join(making.PRESENT)}.")
    if changed:
        print(f"The working tree differs from commit {commit}: commit first, so that the report names what was run.")
    bad = False
    for number, call in enumerate(PROGRAMMES[options.programme], start=1):
        paths = ", ".join(str(path.relative_to(ROOT)) for path in making.carried(call))
        print(
            f"\nCall {number}, at most {call.limit:.0f} s; {making.tree_bytes(call) / making.MIB:.1f} MiB with {paths}:"
        )
        print(f"  {making.command(options.programme, number, commit)}")
        for fault in making.faults(options.programme, number, call, commit):
            print(f"  error: {fault}")
            bad = True
    return 1 if bad else 0


def rehearse(options: argparse.Namespace) -> int:
    """Run the commands in a copy of the working tree without git, with nothing installed but what the machine has."""
    from bench.programme import bundle as making

    if not (BUNDLE / "wheels").is_dir():
        raise ValueError("there is no bundle to rehearse: run gpu_programme.py bundle before")
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        place, programs = Path(folder, "checkout"), making.rehearsal_python(options.python).parent
        work_tree.copy(ROOT, place)
        shutil.copytree(BUNDLE, place / BUNDLE.name, ignore=shutil.ignore_patterns("rehearsal-*"))
        for number, _ in enumerate(PROGRAMMES[options.programme], start=1):
            out = ROOT / "gpu-bundle" / f"rehearsal-{options.programme}{number}"
            shutil.rmtree(out, ignore_errors=True)
            command = f"{making.command(options.programme, number, 'rehearsed')} --rehearse"
            print(f"\n$ {command}", flush=True)
            environment = {
                "PATH": f"{programs}:/usr/bin:/bin",
                "HOME": folder,
                "OUT": str(out),
                "PYTHONUNBUFFERED": "1",
            }
            failed |= subprocess.run(["bash", "-c", command], cwd=place, env=environment).returncode != 0
    return 1 if failed else 0


def run(options: argparse.Namespace) -> int:
    """Run the steps of a call, keep all measurements, and return 1 if a program failed."""
    from bench.programme.results import Results
    from bench.programme.running import run_step

    signal.signal(signal.SIGTERM, stop)
    calls = PROGRAMMES[options.programme]
    if not 1 <= options.call <= len(calls):
        raise ValueError(f"programme {options.programme} has no call {options.call}: use 1 to {len(calls)}")
    call = calls[options.call - 1]
    with tempfile.TemporaryDirectory() as site:
        environment(Path(site))
        facts = versions() | {"programme": f"{options.programme}, call {options.call}"}
        for name, value in facts.items():
            print(f"- {name}: {value}", flush=True)
        if not facts["cuda"] and not options.rehearse:
            raise ValueError("no CUDA device can be seen: run on a machine with a GPU, or add --rehearse")
        results, fine = Results(options.out, facts), True
        for jobs in call.steps:
            limit = max(job.limit for job in jobs) * (PATIENCE if options.rehearse else 1)
            print(f"\n== {', '.join(job.name for job in jobs)}: at most {limit:.0f} s", flush=True)
            fine &= run_step(jobs, results, BUNDLE / "cifar10", PATIENCE if options.rehearse else 1)
        subprocess.run([sys.executable, __file__, "report", str(options.out)])
    return 0 if fine else 1


def environment(site: Path) -> None:
    """Install the bundle's wheels into the folder `site`, and let programs find them and this checkout."""
    wheels = [str(path) for path in BUNDLE.glob("*/*.whl")]
    if wheels:
        words = ("install", "-q", "--no-index", "--no-deps", "--no-compile", "--no-cache-dir", "--target", str(site))
        done = subprocess.run([sys.executable, "-m", "pip", *words, *wheels], capture_output=True, text=True)
        if done.returncode:
            print(f"the bundle's wheels are not used: {done.stderr.strip()[-300:]}", flush=True)
    paths = [str(site), *(str(ROOT / folder) for folder in ("src", "cli", "experiments"))]
    os.environ["PYTHONPATH"] = os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")])
    os.environ["PYTHONUNBUFFERED"] = "1"
    if not os.access(os.environ.get("HOME", ""), os.W_OK):
        os.environ["HOME"] = str(site)  # Triton and others keep caches there


def versions() -> dict[str, Any]:
    """Return the header, collected by another process so that this one uses no GPU memory."""
    command = [sys.executable, "-m", "bench.programme.versions"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise ValueError(f"torch does not work here: {done.stderr.strip()[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1]) | {"command": shlex.join(["python", *sys.argv])}


def report(options: argparse.Namespace) -> int:
    """Print the report; with --to, write it and the raw measurements."""
    from bench.json_file import write_json
    from bench.programme.report import report as text_of
    from bench.programme.results import merged

    results = merged(options.folders)
    text = text_of(results)
    print(text)
    if options.to:
        name = next((call["hardware"] for call in results["calls"] if call.get("cuda")), "rehearsal")
        stem = f"gpu_{name.removeprefix('NVIDIA ').split()[0].lower()}_{date.today().isoformat()}"
        (options.to / "raw").mkdir(parents=True, exist_ok=True)
        (options.to / f"{stem}.md").write_text(text)
        write_json(options.to / "raw" / f"{stem}.json", results)
        print(f"written    {options.to / f'{stem}.md'}")
    return 0


def stop(number: int, frame: object) -> NoReturn:
    """End on a signal, with the running programs."""
    sys.exit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
