"""Compare the step time of vitpar with a hand-written loop for the same plan, on the CPU.

    python experiments/bench_cpu.py                        # about 5 minutes on two cores
    python experiments/bench_cpu.py --quick --only dp2     # seconds, a tiny model: does it run?

In each case both contenders run in the same processes and train the same ViT on the same batches: forward, backward,
clipping and AdamW, without data loading. Before timing, the losses and gradient norms of three steps must agree to
1e-4 (2e-2 in bf16). Then the contenders take turns step by step. The ratio is the median over pairs of steps, "±" half
the interquartile range. The ratio of CPU time (all threads of all ranks) excludes waiting, so it is steadier on a busy
machine. Memory is measured in separate runs of one contender each: the peak resident memory of the rank that uses most,
minus its resident memory after importing torch. The model of case "host" is so small that the host's overhead per
operation is nearly all of a step.

Speeds are reported, not judged: exit code 1 only if a case fails, for example because losses differ.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bench.by_hand import BY_HAND
from bench.harness import (
    RETURNS_FREED,
    Report,
    Spread,
    answer,
    is_rank,
    memory,
    on_ranks,
    parser,
    ratio,
    slowest,
    take_turns,
)
from bench.ours import vitpar_step
from bench.settings import SEED, Step
from vitpar.models import ViTConfig, model_config
from vitpar.strategy import batch_arithmetic, image_layout, parse, place_of_rank, validate

WARM_UP = 3
TOLERANCE = {"fp32": 1e-4, "bf16": 2e-2}
"""Largest relative difference of losses and gradient norms in warm-up steps."""


@dataclass(frozen=True)
class Size:
    """Model, batch and number of timed steps."""

    model: str
    options: dict[str, int]
    """Settings of the model that differ from those of `model`."""
    batch_size: int
    """Global batch size."""
    rounds: int
    """Most pairs of timed steps."""
    seconds: float
    """Time limit of all pairs: later ones are skipped, but at least 5 are timed."""
    memory: bool = False
    """Whether to measure memory."""

    @property
    def config(self) -> ViTConfig:
        """Configuration of the model.

        Its initial values are perturbed: zeros would leave some gradients at zero, and hide errors in them.
        """
        return model_config(self.model, init="perturbed", **self.options)


# ViT-Ti/16 on images of 112 pixels (50 tokens), with 4 heads instead of 3 so that two ranks can split them.
FULL = Size("vit_tiny_patch16_112", {"num_heads": 4, "num_classes": 100}, 32, rounds=24, seconds=25, memory=True)
QUICK = Size("vit_nano_patch4_16", {"depth": 4, "num_classes": 10}, 16, rounds=10, seconds=2)
HOST = Size(
    "vit_tiny_patch16_224",
    {"embed_dim": 48, "num_heads": 3, "mlp_hidden_dim": 48, "image_size": 16, "num_classes": 10},
    batch_size=1,
    rounds=200,
    seconds=20,
)
CASES: dict[str, tuple[str, str, float]] = {
    "one": ("dp1", "plain PyTorch loop", 1.01),
    "dp2": ("dp2", "DistributedDataParallel", 1.03),
    "fsdp2": ("fsdp2", "fully_shard, per block and root", 1.03),
    "pp2": ("pp2", "PipelineStage + Schedule1F1B, 4 micro-batches", 1.03),
    "tp2": ("tp2", "parallelize_module", 1.03),
    "host": ("dp1", "plain loop, bf16 autocast, 1 token", 1.03),
}
"""Strategy, hand-written counterpart, and largest acceptable ratio of step times, by name of the case."""


def main() -> int:
    """Read the options, measure and print the table."""
    options = parser(__doc__, CASES)
    options.add_argument("--quick", action="store_true", help="a tiny model and few steps, no memory")
    given = options.parse_args()
    size = QUICK if given.quick else FULL
    report = Report(given.json, model=f"{size.model} with {size.options}, batch {size.batch_size}, fp32")
    rows, cases = [], []
    for name in given.only or CASES:
        mesh, by_hand, target = CASES[name]
        run = partial(on_ranks, __file__, parse(mesh).world_size, name, "quick" if given.quick else "full")
        # The steps of QUICK are too short to gain from several threads.
        seconds = run("both", **({"OMP_NUM_THREADS": "1"} if given.quick else {}))
        grown = {}
        if size_of(name, size).memory:
            grown = {side: run(side, **RETURNS_FREED) for side in ("hand", "vitpar")}
        times = [Spread.of(1e3 * s for s in seconds[side]["wall"]).text(0) for side in ("hand", "vitpar")]
        ratios = {clock: ratio(seconds["vitpar"][clock], seconds["hand"][clock]) for clock in ("wall", "cpu")}
        mebibytes = " / ".join(f"{count / 2**20:.0f}" for count in grown.values()) or "not measured"
        shown = (spread.text(3) for spread in ratios.values())
        rows.append([name, by_hand, *times, *shown, f"≤ {target}", mebibytes])
        found = {"case": name, "mesh": mesh, "target": target, "seconds": seconds, "memory_bytes": grown}
        cases.append(found | {"ratio": {clock: vars(spread) for clock, spread in ratios.items()}})
        report.keep("cases", cases)
        print(f"{name}: ratio {ratios['wall'].text(3)}", file=sys.stderr, flush=True)
    heads = ("case", "by hand", "by hand, ms", "vitpar, ms", "ratio", "ratio of CPU time", "target", "memory, MiB")
    report.show("cases", heads, rows, cases)
    return 0


def size_of(case: str, size: Size) -> Size:
    """Return the size of a case."""
    return HOST if case == "host" else size


def measure(case: str, size_name: str, side: str) -> Any:
    """Time both contenders on this rank, or measure the memory of one.

    side: hand, vitpar or both.
    """
    size = size_of(case, {"full": FULL, "quick": QUICK}[size_name])
    config, precision, before = size.config, "bf16" if case == "host" else "fp32", memory()
    plan = validate(parse(CASES[case][0]), config, size.batch_size)
    place = image_layout(plan.strategy)[place_of_rank(plan, dist.get_rank())[1]]
    rows = batch_arithmetic(plan, size.batch_size).rows(place)

    def by_hand() -> Step:
        step = BY_HAND[case](config)
        return lambda images, labels: step(images, labels[rows])

    def ours() -> Step:
        step = vitpar_step(config, plan, size.batch_size, torch.device("cpu"), precision=precision)
        return lambda images, labels: step(images.to(step.model.precision.compute), labels)

    steps = {name: make() for name, make in (("hand", by_hand), ("vitpar", ours)) if side in (name, "both")}
    batches = local_batches(size, rows)
    first = [warm_up(step, batches) for step in steps.values()]
    if side != "both":
        return slowest([memory(most=True) - before])[0]
    compare(*first, TOLERANCE[precision])
    settle: Callable[[], object] = dist.barrier if dist.get_world_size() > 1 else lambda: None
    contenders = {name: partial(step, *batches[0]) for name, step in steps.items()}
    trial = sum(times.wall[0] for times in take_turns(contenders, 1, settle).values())
    rounds = slowest([min(size.rounds, max(5, int(size.seconds / trial)))])
    return {
        name: {"wall": slowest(times.wall), "cpu": total(times.cpu)}
        for name, times in take_turns(contenders, int(rounds[0]), settle).items()
    }


def total(seconds: Sequence[float]) -> list[float]:
    """Return the sums over all ranks. Collective."""
    everything = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(everything)
    return everything.tolist()


def local_batches(size: Size, rows: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
    """Return WARM_UP batches: this rank's random images [rows, channels, size, size] and all labels [batch]."""
    config, g = size.config, torch.Generator().manual_seed(SEED)
    batches = []
    for _ in range(WARM_UP):
        images = torch.randn(size.batch_size, config.channels, config.image_size, config.image_size, generator=g)
        labels = torch.randint(0, config.num_classes, (size.batch_size,), generator=g)
        batches.append((images[rows], labels))
    return batches


def warm_up(step: Step, batches: list[tuple[Tensor, Tensor]]) -> list[tuple[float, float]]:
    """Make a step on every batch; return the loss of the global batch and the gradient norm of each."""
    values = []
    for images, labels in batches:
        loss, norm = step(images, labels)
        values.append((total([loss.item()])[0], norm.item()))
    return values


def compare(hand: list[tuple[float, float]], vitpar: list[tuple[float, float]], tolerance: float) -> None:
    """Raise AssertionError if the contenders' losses or gradient norms differ by more than `tolerance` (relative)."""
    for number, (theirs, ours) in enumerate(zip(hand, vitpar, strict=True), start=1):
        for what, a, b in zip(("loss", "gradient norm"), theirs, ours, strict=True):
            assert abs(a - b) <= tolerance * abs(a), f"{what} of step {number} is {a} by hand and {b} in vitpar"


if __name__ == "__main__":
    if is_rank():
        answer(measure)
    sys.exit(main())
