"""Measure training on one GPU in bf16 and fp8, compared with the chip's limits.

    PYTHONPATH=src python experiments/bench_gpu.py --json gpu.json                       # as much as ten minutes hold
    PYTHONPATH=src python experiments/bench_gpu.py --sections fp8 --json rest.json     # a section that did not fit
    PYTHONPATH=src python experiments/bench_gpu.py --sections fp8 --fp8-fast-accum always
    python experiments/bench_gpu.py --device cpu --tiny                  # seconds: does the program run?

The most important rows come first, and each row is printed and written at once. Rows that would not end within
--minutes (by estimates; compiling takes longest) are skipped and named. Exit code 1: something failed.

1. limits: FLOP/s of the model's own matrix products (the linear layers of a block, forward and backward, in bf16), in
   bursts of a fraction of a second and sustained for seconds, and bytes/s of a copy
2. vitpar: the trainer's step on one batch in GPU memory, every block compiled. The table compares MFU with the
   prediction, the goal, and the sustained rate of the products alone divided by the chip's dense bf16 peak. It also
   shows how often a step waits for the GPU, the number of kernels, and how much of the time the GPU runs them. A second
   table splits the step into phases.
3. input: the first model on JPEG files of 500x375 pixels from shards, in turns with the batch in GPU memory
   (needs all of vitpar's packages)
4. fp8: vitpar's step in fp8, in turns with bf16, for models at least 1280 wide; also both losses after equally many
   steps on one batch

All train with fused AdamW and clip by the global norm. Before timing, vitpar's first loss and gradient norm are
compared with those of the plain, uncompiled ViT in bf16. A time is that of a block of --steps steps between two
synchronisations, after a warm-up that also compiles. Batch sizes depend on the free memory (bench/gpu_models.py) and
are halved if they do not fit. Tables show the median of the blocks ± half the interquartile range. MFU counts the
matrix products of forward × 3 (``ViTConfig.flops``). Memory is the peak of what the contender itself allocated.

For timm and a plain compiled loop see bench_peers.py. This script needs torch, einops, numpy and this checkout, but
not rich.
"""

import argparse
import gc
import os
import sys
import traceback
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from bench.gpu_models import MODELS, batch_for, prediction
from bench.harness import Spread, parser, ratio, take_turns
from bench.settings import Step

try:
    from bench.gpu_reference import difference, random_batch, reference
    from bench.gpu_rows import Memory, Run, gibibytes, named, percent
    from bench.one_gpu import bandwidth, kernels, matrix_products, phases, settle, waits
    from bench.ours import vitpar_step
    from vitpar.errors import RecipeError
    from vitpar.launch import ALONE, join, leave
    from vitpar.models import ViTConfig, model_config
    from vitpar.parallel.float8 import FAST
    from vitpar.strategy import parse, validate
    from vitpar.strategy.execution import FP8_MIN_FEATURES
    from vitpar.strategy.kernels import ATTENTION_KERNELS
except ModuleNotFoundError as error:
    sys.exit(f"error: there is no module {error.name}: install it, and run from the checkout with PYTHONPATH=src")

TINY_MODEL, TINY = "vit_tiny_patch16_224", {"depth": 2, "image_size": 32}
FP8_WIDTH = 1280
"""Smallest embed_dim for the fp8 section: narrower models gain less by fp8, and a row takes its time."""
SECTIONS = ("vitpar", "input", "fp8")
SECTIONS_HELP = "of: vitpar, input (with vitpar), fp8; limits always"
WARM_UP = 5
REPEATS = 5


def main() -> int:
    """Read the options, measure, print tables and return the exit code."""
    options = arguments()
    device = join(ALONE, options.device)
    run = Run(options, device)
    models = {name: model_config(name, init="perturbed", **(TINY if options.tiny else {})) for name in options.models}
    free = torch.cuda.mem_get_info()[0] if device.type == "cuda" else 0
    sizes = {name: options.batch_size or (4 if options.tiny else batch_for(name, free)) for name in models}
    jobs = [(models[name], sizes[name]) for name in models]
    try:
        measure_all(run, jobs)
    finally:  # show the rows so far: after a lost GPU, everything else fails
        run.show()
    leave()
    return 1 if run.failed else 0


def measure_all(run: Run, jobs: list[tuple[ViTConfig, int]]) -> None:
    """Measure the chosen sections, the most important rows first."""
    sections = run.options.sections
    for config, size in jobs:
        attempt(run, "limits", 5, config, size, limits)
    for number, (config, size) in enumerate(jobs if "vitpar" in sections else []):
        with_input = number == 0 and "input" in sections
        attempt(run, "vitpar", 20 + config.depth, config, size, partial(ours, with_input=with_input))
    wide = [job for job in jobs if job[0].embed_dim >= FP8_WIDTH or run.options.tiny]
    for config, size in sorted(wide, key=lambda job: -job[0].embed_dim) if "fp8" in sections else []:
        attempt(run, "fp8", 25 + 1.5 * config.depth, config, size, float8)


def arguments() -> argparse.Namespace:
    """Parse and check the command line."""
    made = parser(__doc__)
    made.add_argument("--models", nargs="+", default=list(MODELS), metavar="NAME", help="timm's names")
    made.add_argument("--batch-size", type=int, metavar="N", help="images a step, for every model")
    made.add_argument("--steps", type=int, default=10, metavar="N", help="steps of a timed block (default 10)")
    made.add_argument("--sections", nargs="+", choices=SECTIONS, default=SECTIONS, metavar="NAME", help=SECTIONS_HELP)
    made.add_argument("--minutes", type=float, default=9.5, metavar="N", help="what would end later is left out (9.5)")
    made.add_argument(
        "--fp8-fast-accum", choices=FAST, default="forward", help="as train.fp8_fast_accum (default forward)"
    )
    made.add_argument(
        "--attention", choices=("auto", *ATTENTION_KERNELS["cuda"]), default="auto", help="as train.attention (auto)"
    )
    made.add_argument(
        "--workers", type=int, nargs="+", metavar="N", help="decoding threads (default: one a core, but one)"
    )
    made.add_argument(
        "--augment", nargs="+", choices=("crop", "rand"), default=["crop"], help="of section input (crop)"
    )
    made.add_argument("--decode", nargs="+", choices=("host", "device"), default=["host"], help="as data.decode (host)")
    made.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    made.add_argument("--tiny", action="store_true", help=f"{TINY_MODEL} cut to {TINY}: only to see the program run")
    options = made.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        made.error("no CUDA device can be seen: run on a machine with a GPU, or try --device cpu --tiny")
    if options.steps < 1 or (options.batch_size or 1) < 1:
        made.error("--steps and --batch-size must be at least 1")
    if "input" in options.sections and "vitpar" not in options.sections:
        made.error("section input goes with vitpar, whose step it feeds: add vitpar to --sections")
    if options.tiny:
        options.models = [TINY_MODEL]
    return options


def attempt(run: Run, what: str, seconds: float, config: ViTConfig, batch_size: int, measure: Any) -> None:
    """Measure one model if time is left; halve the batch if it does not fit into memory.

    Errors are recorded and printed but not raised, so that the other rows are still measured.

    what: section. seconds: estimated duration. measure: called with run, config and batch size.
    """
    name = f"{what}, {config.name}"
    if not run.has_time(name, seconds):
        return
    fits = True
    try:
        measure(run, config, batch_size)
    except torch.OutOfMemoryError:
        fits = False
        run.leave_out(f"{name}, batch {batch_size}", "it does not fit into memory")
    except RecipeError as refused:  # fp8 on a GPU without it
        run.leave_out(name, str(refused))
    except Exception as error:
        traceback.print_exc()
        run.fail(name, f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"[:300])
    gc.collect()
    torch._dynamo.reset()
    if run.device.type == "cuda":
        torch.cuda.empty_cache()
    if not fits and batch_size > 1:  # not in the except clause, where the error keeps the tensors alive
        attempt(run, what, seconds, config, batch_size // 2, measure)


def limits(run: Run, config: ViTConfig, batch_size: int) -> None:
    """Measure FLOP/s of this model's matrix products and bytes/s of a copy."""
    burst, sustained = matrix_products(config, batch_size, run.device)
    run.products[config.name] = sustained
    copied = bandwidth(run.device, 16 if run.options.tiny else 1024)
    cells = [
        named(config, batch_size),
        f"{burst / 1e12:.1f}",
        f"{sustained / 1e12:.1f}",
        percent(run.peak and sustained / run.peak),
        f"{copied / 1e9:.0f}",
    ]
    facts = {"model": config.name, "batch_size": batch_size, "peak": run.peak}
    run.row("limits", cells, **facts, burst=burst, sustained=sustained, copy=copied)


def ours(run: Run, config: ViTConfig, batch_size: int, *, with_input: bool) -> None:
    """Measure vitpar's step alone; with `with_input`, also training on JPEG files."""
    batch = random_batch(config, batch_size, run.device)
    memory, step = Memory(run.device), make_ours(run, config, batch_size, kernel=run.options.attention)
    expected = reference(config, step.model.state_dict(), *batch)
    apart = difference([value.item() for value in step(*batch)], expected)
    print(f"\n- {config.name}, first step, vitpar against the unwrapped ViT in bf16: {apart}", flush=True)
    repeat(step, batch, WARM_UP)
    memory.forget()
    times = take_turns(
        {"vitpar": partial(repeat, step, batch, run.options.steps)}, REPEATS, partial(settle, run.device)
    )
    seconds = [wall / run.options.steps for wall in times["vitpar"].wall]
    middle = Spread.of(seconds).middle
    mfu = config.flops * batch_size / middle / run.peak if run.peak else None
    peak_bytes = memory.peak()
    waited, launched = waits(partial(step, *batch)), kernels(partial(step, *batch))
    parts = phases(step, batch, run.device)
    rate = run.products.get(config.name)
    busy = launched[1] / middle if launched else None
    run.row(
        "vitpar",
        [
            named(config, batch_size),
            Spread.of([1e3 * s for s in seconds]).text(2),
            Spread.of([batch_size / s for s in seconds]).text(1),
            percent(mfu),
            prediction(config.name, batch_size, run.card),
            f"≥ {MODELS[config.name].goal:g} %" if config.name in MODELS else "–",
            percent(run.peak and rate and rate / run.peak),
            "–" if waited is None else f"{waited:g}",
            "–" if launched is None else f"{launched[0]:.0f}",
            percent(busy),
            gibibytes(peak_bytes),
        ],
        model=config.name,
        batch_size=batch_size,
        seconds=seconds,
        mfu=mfu,
        memory_bytes=peak_bytes,
        waits=waited,
        kernels=launched,
        attention=step.attention.to_json(),
    )
    told = ", ".join(f"{name} {time:.2f}" for name, time in parts.items())
    run.row("phases", [named(config, batch_size), told], model=config.name, batch_size=batch_size, ms=parts)
    if with_input:
        attempt(
            run,
            "input",
            45 * len(run.options.augment) * len(run.options.decode),
            config,
            batch_size,
            partial(jpeg, step=step, batch=batch),
        )


def jpeg(run: Run, config: ViTConfig, size: int, *, step: Any, batch: tuple[Tensor, Tensor]) -> None:
    """Measure how much slower the model trains on JPEG files than on a batch in memory, by the way to prepare them."""
    try:
        from bench.jpeg_input import Feed, beside_synthetic
    except ImportError as error:
        run.leave_out(f"input, {config.name}", f"there is no {error.name}")
        return
    options = run.options
    workers = options.workers or [max(1, (os.cpu_count() or 2) - 1)]
    ways = product(options.decode, options.augment, workers)  # what needs torchcodec comes last
    feeds = [Feed(threads, name == "rand", decode) for decode, name, threads in ways]
    sizes = {"steps": 30, "rounds": 2, "photographs": 3000}
    if options.tiny:
        sizes = {"steps": 2, "rounds": 2, "photographs": 20}
    for feed, found in beside_synthetic(step, batch, run.device, feeds, **sizes):
        seconds = found["seconds"]
        rates = [Spread.of([size / s for s in seconds[name]]).text(1) for name in ("synthetic", "JPEG")]
        kept = ratio(seconds["synthetic"], seconds["JPEG"])
        cells = [named(config, size), feed.name, *rates, kept.text(3), "≥ 0.95", f"{found['input_alone']:.0f}"]
        run.row("input", cells, model=config.name, batch_size=size, feed=feed.name, **found)


def float8(run: Run, config: ViTConfig, batch_size: int) -> None:
    """Time vitpar's step in fp8 in turns with bf16."""
    batch, steps = random_batch(config, batch_size, run.device), run.options.steps
    made: dict[str, Any] = {}
    contenders, memory = {}, {}
    for name, precision in (("vitpar", "bf16"), ("fp8", "fp8")):
        measured = Memory(run.device)
        kernel = made["vitpar"].attention.backend or "auto" if made else run.options.attention
        step = made[name] = make_ours(run, config, batch_size, precision, kernel)
        repeat(step, batch, WARM_UP)
        measured.forget()
        repeat(step, batch, 1)
        memory[name], contenders[name] = measured.peak(), partial(repeat, step, batch, steps)
    times = take_turns(contenders, REPEATS, partial(settle, run.device))
    losses = {name: step(*batch)[0].item() for name, step in made.items()}  # after equally many steps
    seconds = {name: [wall / steps for wall in one.wall] for name, one in times.items()}
    shown = [Spread.of([1e3 * s for s in one]).text(2) for one in seconds.values()]
    cells = [named(config, batch_size), *shown, ratio(seconds["fp8"], seconds["vitpar"]).text(3)]
    cells += [*map(gibibytes, memory.values()), *(f"{loss:.4f}" for loss in losses.values())]
    facts = {"model": config.name, "batch_size": batch_size, "losses": losses}
    run.row("fp8", cells, **facts, seconds=seconds, memory_bytes=memory)


def make_ours(run: Run, config: ViTConfig, batch_size: int, precision: str = "bf16", kernel: str = "auto") -> Any:
    """Build vitpar's step under dp1."""
    plan = validate(parse("dp1"), config, batch_size)
    return vitpar_step(
        config,
        plan,
        batch_size,
        run.device,
        precision=precision,
        compile_blocks=run.compiled,
        kernel=kernel,
        fp8_min_features=0 if run.options.tiny else FP8_MIN_FEATURES,
        fp8_fast_accum=run.options.fp8_fast_accum,
    )


def repeat(step: Step, batch: tuple[Tensor, Tensor], steps: int) -> None:
    """Make `steps` steps on the same batch."""
    for _ in range(steps):
        step(*batch)


if __name__ == "__main__":
    sys.exit(main())
