"""Compare the training speed of vitpar, timm and plain PyTorch: ViT and Swin.

    python experiments/bench_peers.py                          # CPU: ViT, then Swin; fp32 and bf16
    python experiments/bench_peers.py --compile --precision fp32
    python experiments/bench_peers.py --device cuda --json peers.json     # B/16, compiled, in ten minutes at most
    python experiments/bench_peers.py --device cuda --models vit_large_patch16_224 --json large.json
    python experiments/bench_peers.py --tiny                   # seconds: does the program run?

Every contender starts from the same parameters and trains on the same batches, which are already on the device. All
use fused AdamW (weight decay on matrices only), the same clipping and the same precision (autocast, except in vitpar).
Each contender runs in a separate process and is paused between two steps while others have their turn. A turn is one
untimed step (caches and the allocator are in the state the last contender left) and --steps timed ones. On a CPU all
processes are started --restarts times in different orders and their times are pooled, because two processes of the
same program differ in speed by where their memory lies. Before timing, the numbers of parameters must be equal and the
losses of the first three steps must agree to 1e-4 in fp32 and 2e-2 in bf16.

Ratios are relative to vitpar's step, round by round; "±" is half the interquartile range. CPU time counts all threads
of a process; page faults are those of a step (median of the rounds). Memory is the peak that a process allocated on the
GPU. On a GPU one call trains one model. Contenders that would not be ready within --minutes are left out, and no round
begins later, except the first two. --json is written when a contender is ready and after every round. Contenders that
are not installed are left out, with the reason. Exit code 1: an installed contender failed, or losses differ.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

from bench.gpu_models import GIB, MODELS, batch_for, predicted_seconds
from bench.harness import Report, Spread, parser, ratio, table, turns
from bench.peers import CONTENDERS
from bench.peers.job import Job
from bench.peers.running import TOLERANCE, Contender, Left, Timed, difference
from vitpar.models.families import family_of

SMALL = {"vit": {"num_heads": 4, "num_classes": 100}, "swin": {"num_classes": 100}}
"""Options of the models on a CPU, by family."""
TINY = {
    "vit": {"depth": 2, "image_size": 32, "num_classes": 10},
    "swin": {"embed_dim": 24, "depths": (2, 1, 1, 1), "num_classes": 10},
}
"""Options for --tiny, likewise."""
WARM_UP = 5
FEWEST = 2
"""Rounds that always run, even late: a spread needs two."""
START_S = 40.0
"""Rough seconds on a GPU to start and compile a contender."""
SLOWER = 2.0
"""Time of a contender's step on a GPU, at most, relative to the prediction for vitpar's."""
TIMES = ("ms a step", "images/s", "time over vitpar's", "CPU time over vitpar's")
COLUMNS = ("contender", "version", *TIMES, "page faults", "GiB")


def main() -> int:
    """Read the options, measure, print tables and return the exit code."""
    options = arguments()
    report = Report(options.json)
    cases: list[dict[str, Any]] = []
    failed, end = False, time.monotonic() + 60 * options.minutes
    for job in jobs(options):
        title = f"{job.model}, batch {job.batch_size}, {job.precision}" + (", compiled" if job.compiled else "")
        print(f"\n{title}\n", flush=True)
        case: dict[str, Any] = {"title": title, **vars(job), "left_out": {}, "rows": []}
        cases.append(case)

        def keep(timed: Sequence[Timed], case: dict[str, Any] = case) -> None:
            case["rows"] = [one.to_json() for one in timed]
            report.keep("cases", cases)

        failed |= not side_by_side(job, options, end, case["left_out"], keep)
    return 1 if failed else 0


def arguments() -> argparse.Namespace:
    """Parse and check the command line."""
    made = parser(__doc__, CONTENDERS)
    made.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    made.add_argument("--precision", nargs="+", choices=("fp32", "bf16"), help="default: fp32 bf16; on CUDA bf16")
    made.add_argument("--compile", action="store_true", help="on the CPU too; CUDA always does")
    made.add_argument("--models", nargs="+", metavar="NAME", help="timm's names")
    made.add_argument("--batch-size", type=int, metavar="N")
    made.add_argument("--steps", type=int, metavar="N", help="timed steps of a turn (default 3, CUDA 20)")
    made.add_argument("--rounds", type=int, metavar="N", help="turns of each (default 5, CUDA 9)")
    made.add_argument("--restarts", type=int, metavar="N", help="times that all are started (default 5, CUDA 1)")
    made.add_argument("--tiny", action="store_true", help="a tiny model, few steps: only to see the program run")
    made.add_argument(
        "--minutes", type=float, metavar="N", help="what would end later is left out (CUDA 9.5, else no limit)"
    )
    options = made.parse_args()
    gpu = options.device == "cuda"
    if gpu:
        import torch

        if not torch.cuda.is_available():
            made.error("no CUDA device can be seen: run on a machine with a GPU, or leave --device out")
        if len(options.models or ()) > 1:
            made.error("a call on a GPU trains one model: name one with --models, and call again for the next")
    long = gpu or options.compile  # starting takes long
    defaults = {
        "precision": ["bf16"] if gpu else ["fp32", "bf16"],
        "steps": 1 if options.tiny else 20 if gpu else 3,
        "rounds": 9 if long else 5,
        "restarts": 1 if long or options.tiny else 5,
        "minutes": 9.5 if gpu else 1e6,
    }
    for name, value in defaults.items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    if options.steps < 1 or options.rounds < FEWEST or options.restarts < 1:
        made.error("--steps and --restarts must be at least 1 and --rounds at least 2")
    return options


def jobs(options: argparse.Namespace) -> list[Job]:
    """Return a job for each model and precision; its contender is set later."""
    gpu, by_family, sizes = options.device == "cuda", SMALL, {}
    models = options.models or ["vit_tiny_patch16_112", "swin_tiny_patch4_window4_64"]
    if options.tiny:
        models, by_family = options.models or ["vit_tiny_patch16_224"], TINY
    elif gpu:
        models, by_family = options.models or [next(iter(MODELS))], {"vit": {}, "swin": {}}
        free = free_memory()
        sizes = {name: batch_for(name, free, peers=True) for name in models}
    return [
        Job(
            "plain",
            model,
            options.batch_size or (4 if options.tiny else sizes.get(model, 16)),
            by_family[family_of(model).FAMILY],
            precision,
            options.device,
            compiled=gpu or options.compile,
        )
        for model in models
        for precision in options.precision
    ]


def free_memory() -> int:
    """Return the free bytes of the GPU.

    Asks a separate process, because a CUDA context in this one would use some of them.
    """
    code = "import torch; print(torch.cuda.mem_get_info()[0])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    return 80 * GIB if done.returncode else int(done.stdout)


def side_by_side(
    job: Job, options: argparse.Namespace, end: float, left: dict[str, str], keep: Callable[[Sequence[Timed]], None]
) -> bool:
    """Measure all contenders of a job, print their table and return whether all trained correctly.

    end: time limit on the monotonic clock. left: reasons of contenders that are left out, filled here. keep: called
    with the measurements so far.
    """
    names, ok, timed = options.only or list(CONTENDERS), True, dict[str, Timed]()
    for start in range(options.restarts):
        order = names[start % len(names) :] + names[: start % len(names)]
        reported = set(left)
        found, fine = together(job, options, order, left, end, (lambda now: None) if start else keep)
        ok &= fine
        for name in left.keys() - reported:
            print(f"- {name} is left out, {left[name]}", flush=True)
        again = {one.contender.name: one for one in found}
        if not start:
            timed = {name: again[name] for name in map(CONTENDERS.get, names) if name in again}
            ok &= alike(list(timed.values()), job.precision)
            continue
        timed = {name: one.extended(again[name]) for name, one in timed.items() if name in again}
    keep(list(timed.values()))
    print("\n".join(["", *table(COLUMNS, rows(list(timed.values()), job))]), flush=True)
    return ok and bool(timed)


def together(
    job: Job,
    options: argparse.Namespace,
    names: list[str],
    left: dict[str, str],
    end: float,
    ready: Callable[[Sequence[Timed]], None],
) -> tuple[list[Timed], bool]:
    """Start the processes of all contenders and time them in turns; return the times and whether none failed.

    left: reasons of contenders that were left out; they are not started again, and new ones are added. end: time limit
    on the monotonic clock. ready: called with all measurements after each start and each round.
    """
    ok, timed = True, list[Timed]()
    with ExitStack() as ends:
        for name in names:  # start one at a time: vitpar benchmarks kernels at its start
            if CONTENDERS[name] in left:
                continue
            if end - time.monotonic() < needed_seconds(job, options, len(timed) + 1):
                left[CONTENDERS[name]] = "late: it would not be ready within --minutes"
                continue
            contender = ends.enter_context(Contender(replace(job, contender=name)))
            try:
                contender.ready()
                losses = contender.turn(3, losses=True)["losses"]
                contender.turn(WARM_UP if not options.tiny else 1)
                timed.append(Timed(contender, losses))
                ready(timed)
            except Left as gone:
                ok &= gone.kind == "missing"
                left[contender.name] = f"{gone.kind}: {gone.why}"
        measure(timed, options.rounds, options.steps, end, partial(ready, timed))
    return timed, ok


def measure(timed: Sequence[Timed], rounds: int, steps: int, end: float, after: Callable[[], None]) -> None:
    """Run the rounds and add the measurements of each contender.

    end: time on the monotonic clock after which no round begins, except the first two. after: called after every round.
    """
    by_name = {one.contender.name: one for one in timed}
    contenders = {name: partial(one.contender.turn, steps, untimed=1) for name, one in by_name.items()}
    for number, answers in enumerate(turns(contenders, rounds if timed else 0), start=1):
        for name, answer in answers.items():
            by_name[name].add(answer, steps)
        after()
        if number >= FEWEST and time.monotonic() > end:
            break


def needed_seconds(job: Job, options: argparse.Namespace, contenders: int) -> float:
    """Return the seconds to start one contender more and to run all rounds of `contenders`; 0 on a CPU."""
    if job.device == "cpu":
        return 0.0
    step = predicted_seconds(job.model, job.batch_size, "H100") or 0.5
    return START_S + SLOWER * step * (options.steps + 1) * options.rounds * contenders


def alike(timed: Sequence[Timed], precision: str) -> bool:
    """Return whether all contenders have equal parameter counts and losses; print how much the losses differ."""
    ok = True
    for one in timed[1:]:
        first, apart = timed[0], difference(one.losses, timed[0].losses)
        same = one.contender.parameters == first.contender.parameters
        ok &= same and apart <= TOLERANCE[precision]
        print(
            f"- {one.contender.name}: {one.contender.parameters:,} parameters"
            f"{'' if same else f', not {first.contender.parameters:,}'}; losses of the first steps up to {apart:.1e} "
            f"from those of {first.contender.name}{'' if apart <= TOLERANCE[precision] else ': not the same training'}",
            flush=True,
        )
    return ok


def rows(timed: Sequence[Timed], job: Job) -> list[list[str]]:
    """Return the rows of the table, one per contender."""
    return [
        [
            one.contender.name,
            one.contender.version,
            Spread.of(1e3 * seconds for seconds in one.wall).text(2),
            Spread.of(job.batch_size / seconds for seconds in one.wall).text(1),
            ratio(one.wall, timed[0].wall).text(3) if one is not timed[0] else "1",
            ratio(one.cpu, timed[0].cpu).text(3) if one is not timed[0] else "1",
            f"{median(one.faults):,.0f}",
            "–" if one.memory_bytes is None else f"{one.memory_bytes / 2**30:.2f}",
        ]
        for one in timed
    ]


if __name__ == "__main__":
    sys.exit(main())
