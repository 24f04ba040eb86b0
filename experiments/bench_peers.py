"""Compare training speed of vitpar, timm, transformers' Trainer, Lightning's Trainer and plain PyTorch: ViT and Swin.

    python experiments/bench_peers.py                          # CPU: ViT, then Swin; fp32 and bf16
    python experiments/bench_peers.py --compile --precision fp32
    python experiments/bench_peers.py --device cuda --json peers.json     # B/16, compiled, in ten minutes at most
    python experiments/bench_peers.py --device cuda --models vit_large_patch16_224 --json large.json
    python experiments/bench_peers.py --device cuda --largest  # instead: the deepest model of g/14's width that fits
    python experiments/bench_peers.py --tiny                   # seconds: does the program run?

Every contender starts from the same parameters and trains on the same batches, which are already on the device. All
use fused AdamW (weight decay on matrices only), the same clipping and the same precision (autocast, except in vitpar).
Evaluation, saving and progress bars are off. Each contender runs its own loop in a separate process and is paused
between two steps while others have their turn. A turn is one untimed step and --steps timed ones; the order is reversed
every other round. On a CPU all processes are started --restarts times in different orders and their times are pooled,
because two processes of the same program differ in speed by where their memory lies. Before timing, the numbers of
parameters must be equal and the losses of the first three steps must agree to 1e-4 in fp32 and 2e-2 in bf16.

"vitpar, whole loop" is its Trainer with metrics and a log interval of 10 steps. Ratios are relative to it if its
packages are installed, else to vitpar's bare step. They are taken round by round; "±" is half the interquartile range.
CPU time counts all threads of a process; page faults are those of a step (median of the rounds). Memory is the peak
that a process allocated on the GPU. On a GPU one call trains one model. Contenders that would not be ready within
--minutes are left out, and no round begins later. --json is written when a contender is ready and after every round.
Contenders that are not installed are left out, with the reason; transformers' Trainer trains ViTs only. Exit code 1: an
installed contender failed, or losses differ.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from bench.gpu_models import GIB, MODELS, batch_for, predicted_seconds
from bench.header import header
from bench.json_file import write_json
from bench.peers import CONTENDERS, ONLY_VIT, OURS
from bench.peers.job import Job
from bench.peers.largest import Trials, deepest
from bench.peers.running import TOLERANCE, Contender, Left, Timed, difference, take_turns
from bench.timing import Spread, ratio
from vitpar.models.families import family_of

SMALL = {"vit": {"num_heads": 4, "num_classes": 100}, "swin": {"num_classes": 100}}
"""Options of the models on a CPU, by family."""
TINY = {
    "vit": {"depth": 2, "image_size": 32, "num_classes": 10},
    "swin": {"embed_dim": 24, "depths": (2, 1, 1, 1), "num_classes": 10},
}
"""Options for --tiny, likewise."""
WARM_UP = 5
START_S = 60.0
"""Rough seconds on a GPU to start and compile a contender."""
SLOWER = 2.0
"""Time of a contender's step on a GPU, at most, relative to the prediction for vitpar's."""
TIMES = ("ms a step", "images/s", "time over vitpar's", "CPU time over vitpar's")
COLUMNS = ("contender", "version", *TIMES, "page faults", "GiB")


def main() -> int:
    """Read the options, measure, print tables and return the exit code."""
    options = arguments()
    facts = header()
    console = Console(width=None if sys.stdout.isatty() else 200, highlight=False)
    for name, value in facts.items():
        console.print(f"- {name}: {value}", soft_wrap=True)
    found: dict[str, Any] = {"header": facts, "cases": []}
    failed = False
    end = time.monotonic() + 60 * options.minutes
    for job in jobs(options):
        title = f"{job.model}, batch {job.batch_size}, {job.precision}" + (", compiled" if job.compiled else "")
        console.print(f"\n{title}\n", soft_wrap=True)
        case: dict[str, Any] = {"title": title, **vars(job)}
        found["cases"].append(case)

        def keep(more: dict[str, Any], case: dict[str, Any] = case) -> None:
            case.update(more)
            if options.json:
                write_json(options.json, found)

        if options.largest:
            result, ok = largest(job, options, console)
        else:
            result, ok = beside(job, options, console, end, keep)
        failed |= not ok
        keep(result)
    return 1 if failed else 0


def arguments() -> argparse.Namespace:
    """Parse and check the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=CONTENDERS, metavar="NAME", help=", ".join(CONTENDERS))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--precision", nargs="+", choices=("fp32", "bf16"), help="default: fp32 bf16; on CUDA bf16")
    parser.add_argument("--compile", action="store_true", help="on the CPU too; CUDA always does")
    parser.add_argument("--models", nargs="+", metavar="NAME", help="timm's names")
    parser.add_argument("--batch-size", type=int, metavar="N")
    parser.add_argument("--steps", type=int, metavar="N", help="timed steps of a turn (default 3, CUDA 20)")
    parser.add_argument("--rounds", type=int, metavar="N", help="turns of each (default 5, CUDA 9)")
    parser.add_argument("--restarts", type=int, metavar="N", help="times that all are started (default 5, CUDA 1)")
    parser.add_argument("--largest", action="store_true", help="instead: the deepest model of g/14's width that fits")
    parser.add_argument("--pretend-mb", type=int, metavar="N", help="with --largest: memory for parameters and AdamW")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, few steps: only to see the program run")
    parser.add_argument(
        "--minutes", type=float, metavar="N", help="what would end later is left out (CUDA 9.5, else no limit)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all measurements there")
    options = parser.parse_args()
    if options.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            parser.error("no CUDA device can be seen: run on a machine with a GPU, or leave --device out")
        if len(options.models or ()) > 1:
            parser.error("a call on a GPU trains one model: name one with --models, and call again for the next")
    elif options.largest and options.pretend_mb is None:
        parser.error("--largest fills a GPU's memory: give --device cuda, or a memory to pretend with --pretend-mb")
    options.precision = options.precision or (["bf16"] if options.device == "cuda" or options.largest else None)
    options.precision = options.precision or ["fp32", "bf16"]
    options.steps = options.steps or (1 if options.tiny else 20 if options.device == "cuda" else 3)
    long = options.device == "cuda" or options.compile  # starting takes long
    if options.rounds is None:
        options.rounds = 9 if long else 5
    if options.restarts is None:
        options.restarts = 1 if long or options.tiny else 5
    if options.minutes is None:
        options.minutes = 9.5 if options.device == "cuda" and not options.largest else 1e6
    if options.steps < 1 or options.rounds < 2 or options.restarts < 1:
        parser.error("--steps and --restarts must be at least 1 and --rounds at least 2")
    return options


def jobs(options: argparse.Namespace) -> list[Job]:
    """Return a job for each model and precision; its contender is set later."""
    gpu, no_options = options.device == "cuda", {"vit": {}, "swin": {}}
    if options.tiny:
        models, by_family, sizes = ["vit_tiny_patch16_224"], TINY, {}
    elif options.largest:
        models, by_family, sizes = ["vit_giant_patch14_224"], no_options, {"vit_giant_patch14_224": 16}
    elif gpu:
        models, by_family = [next(iter(MODELS))], no_options
        free = free_memory()
        sizes = {name: batch_for(name, free, peers=True) for name in options.models or models}
    else:
        models, by_family, sizes = ["vit_tiny_patch16_112", "swin_tiny_patch4_window4_64"], SMALL, {}
    return [
        Job(
            "plain",
            model,
            options.batch_size or (4 if options.tiny else sizes.get(model, 64 if gpu else 16)),
            by_family[family_of(model).FAMILY],
            precision,
            options.device,
            compiled=gpu or options.compile,
            limit_bytes=options.pretend_mb and options.pretend_mb * 2**20,
        )
        for model in options.models or models
        for precision in options.precision
    ]


def free_memory() -> int:
    """Return the free bytes of the GPU.

    Asks a separate process, because a CUDA context in this one would use some of them.
    """
    code = "import torch; print(torch.cuda.mem_get_info()[0])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    return 80 * GIB if done.returncode else int(done.stdout)


def beside(
    job: Job, options: argparse.Namespace, console: Console, end: float, keep: Callable[[dict[str, Any]], None]
) -> tuple[dict[str, Any], bool]:
    """Measure all contenders of a job; return the measurements and whether all trained correctly.

    end: time limit on the monotonic clock. keep: called with the measurements so far.
    """
    left: dict[str, str] = {}
    told: list[str] = []
    ok, timed = True, list[Timed]()
    unable = ONLY_VIT if family_of(job.model).FAMILY != "vit" else ()
    names = [name for name in options.only or CONTENDERS if name not in unable]
    for start in range(options.restarts):
        order = names[start % len(names) :] + names[: start % len(names)]

        def ready(now: list[Timed], first: bool = not start) -> None:
            if first:
                keep({"left_out": left, "rows": [one.to_json() for one in now]})

        found, fine = together(job, options, order, left, end, ready)
        found.sort(key=lambda one: names.index(one.contender.job.contender))
        ok &= fine
        for name in [name for name in left if name not in told]:
            console.print(f"- {name} is left out, {left[name]}", soft_wrap=True)
            told.append(name)
        if not found:
            return {"left_out": left}, False
        if not start:
            ok &= alike(found, job.precision, console)
            timed = found
            continue
        again = {one.contender.name: one for one in found}
        timed = [one for one in timed if one.contender.name in again]  # drop contenders that failed meanwhile
        for one in timed:
            one.wall += again[one.contender.name].wall
            one.cpu += again[one.contender.name].cpu
            one.faults += again[one.contender.name].faults
    console.print(table(timed, job))
    return {"left_out": left, "rows": [one.to_json() for one in timed]}, ok


def together(
    job: Job,
    options: argparse.Namespace,
    names: list[str],
    left: dict[str, str],
    end: float,
    ready: Callable[[list[Timed]], None],
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
        if timed:
            take_turns(timed, options.rounds, options.steps, end, partial(ready, timed))
    return timed, ok


def needed_seconds(job: Job, options: argparse.Namespace, contenders: int) -> float:
    """Return the seconds to start one contender more and to run all rounds of `contenders`; 0 on a CPU."""
    if job.device == "cpu":
        return 0.0
    step = predicted_seconds(job.model, job.batch_size, "H100") or 0.5
    return START_S + SLOWER * step * (options.steps + 1) * options.rounds * contenders


def alike(timed: list[Timed], precision: str, console: Console) -> bool:
    """Return whether all contenders have equal parameter counts and losses; print how much the losses differ."""
    first, ok = timed[0], True
    for one in timed[1:]:
        apart = difference(one.losses, first.losses)
        same = one.contender.parameters == first.contender.parameters
        ok &= same and apart <= TOLERANCE[precision]
        console.print(
            f"- {one.contender.name}: {one.contender.parameters:,} parameters"
            f"{'' if same else f', not {first.contender.parameters:,}'}; losses of the first steps up to {apart:.1e} "
            f"from those of {first.contender.name}{'' if apart <= TOLERANCE[precision] else ': not the same training'}",
            soft_wrap=True,
        )
    return ok


def table(timed: list[Timed], job: Job) -> Table:
    """Return the table with one row per contender."""
    made = Table(*COLUMNS, box=box.MARKDOWN)
    ours = next((one for name in OURS for one in timed if one.contender.job.contender == name), timed[0])
    for one in timed:
        memory = "–" if one.memory_bytes is None else f"{one.memory_bytes / 2**30:.2f}"
        made.add_row(
            one.contender.name,
            one.contender.version,
            Spread.of([1e3 * seconds for seconds in one.wall]).text(2),
            Spread.of([job.batch_size / seconds for seconds in one.wall]).text(1),
            ratio(one.wall, ours.wall).text(3) if one is not ours else "1",
            ratio(one.cpu, ours.cpu).text(3) if one is not ours else "1",
            f"{median(one.faults):,.0f}",
            memory,
        )
    return made


def largest(job: Job, options: argparse.Namespace, console: Console) -> tuple[dict[str, Any], bool]:
    """Find the deepest model of each contender with all its memory savings; return them and whether none failed."""
    made = Table("contender", "blocks", "parameters, M", "the next one", box=box.MARKDOWN)
    found: dict[str, Any] = {}
    ok = True
    for name in options.only or [name for name in CONTENDERS if name != "vitpar_trainer"]:
        trials = Trials(replace(job, contender=name))
        try:
            depth = deepest(trials, most=4096)
        except Left as gone:
            ok &= gone.kind == "missing"
            console.print(f"- {CONTENDERS[name]} is left out, {gone.kind}: {gone.why}", soft_wrap=True)
            continue
        found[name] = {"depth": depth, "trials": trials.done, "full": trials.full}
        made.add_row(CONTENDERS[name], f"{depth}", f"{parameters(job, depth) / 1e6:,.0f}", trials.full[:80])
    console.print(made)
    return {"largest": found}, ok


def parameters(job: Job, depth: int) -> int:
    """Return the number of parameters of the job's model with `depth` blocks."""
    import torch

    from vitpar.models.layers import LayeredModel

    with torch.device("meta"):
        shape = replace(job, options={**job.options, "depth": depth}).config
        return sum(p.numel() for p in LayeredModel(shape).parameters())


if __name__ == "__main__":
    sys.exit(main())
