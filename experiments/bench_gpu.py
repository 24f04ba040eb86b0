"""One GPU, synthetic data, bf16: vitpar beside timm's model and beside its own ViT in a plain loop.

    PYTHONPATH=src python experiments/bench_gpu.py --json gpu.json       # about 6 minutes on an H200
    python experiments/bench_gpu.py --device cpu --tiny                  # seconds: does the program run?

Contenders, each with AdamW (fused), clipping by the global norm and one fixed batch in the GPU's memory:

- vitpar: the trainer's step (``fully_shard`` carries bf16), every block compiled
- plain: the same ViT, unwrapped, ``torch.compile`` on the whole, bf16 autocast
- timm: timm's model of that name in the same plain loop, where timm is installed

First vitpar's first loss and gradient norm are compared with the unwrapped, uncompiled ViT in bf16. Then the contenders
take turns, in blocks of --steps steps between two synchronisations, after a warm-up that also compiles. Shown are means
± standard deviations over REPEATS blocks. MFU counts the matrix products of forward × 3 (``ViTConfig.flops``) over the
chip's dense bf16 peak. Memory is the peak of what the contender allocated itself.

Needs torch, einops and this checkout; not pydantic, webdataset or rich.
"""

import argparse
import gc
import importlib.util
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from bench.header import header
from bench.settings import BETAS, CLIP, EPS, LR, SEED, Step, decay_groups
from bench.timing import take_turns
from torch import Tensor, nn

try:
    from bench.ours import vitpar_step

    from vitpar.launch import ALONE, join, leave
    from vitpar.models import ViTConfig, model_config
    from vitpar.models.initial import initialise
    from vitpar.models.vit import ViT
    from vitpar.strategy import parse
    from vitpar.train.metrics import peak_flops
except ModuleNotFoundError as error:
    sys.exit(f"error: there is no module {error.name}: install it, and run from the checkout with PYTHONPATH=src")

BATCH_SIZES = {"vit_base_patch16_224": 512, "vit_large_patch16_224": 256, "vit_huge_patch14_224": 128}
TINY_MODEL, TINY = "vit_tiny_patch16_224", {"depth": 2, "image_size": 32}
WARM_UP = 5
REPEATS = 5


@dataclass(frozen=True)
class Row:
    """What one contender did. seconds: of a step, one mean for each block. mfu: None where the peak is not known."""

    model: str
    contender: str
    batch_size: int
    seconds: list[float]
    mfu: float | None
    memory_bytes: int | None

    def cells(self, ours: list[float]) -> list[str]:
        """As the table shows it; `ours`: vitpar's seconds in the same rounds."""
        milliseconds = [1e3 * s for s in self.seconds]
        rates = [self.batch_size / s for s in self.seconds]
        faster = statistics.mean(theirs / s for theirs, s in zip(self.seconds, ours, strict=True))
        return [
            f"{self.model}, batch {self.batch_size}",
            self.contender,
            f"{statistics.mean(milliseconds):.2f} ± {statistics.stdev(milliseconds):.2f}",
            f"{statistics.mean(rates):.1f} ± {statistics.stdev(rates):.1f}",
            "–" if self.mfu is None else f"{100 * self.mfu:.1f} %",
            "–" if self.memory_bytes is None else f"{self.memory_bytes / 2**30:.2f}",
            f"{faster:.3f}",
        ]


COLUMNS = ["model", "contender", "ms/step", "images/s", "MFU", "peak GiB", "time over vitpar's"]


def main() -> int:
    """The program; returns its exit code."""
    options = arguments()
    device = join(ALONE, options.device)
    facts = header()
    for name, value in facts.items():
        print(f"- {name}: {value}")
    contenders = ["vitpar", "plain", "timm"]
    if options.no_timm or not installed("timm"):
        contenders.remove("timm")
        print("- timm: left out" if options.no_timm else "- timm: not installed, so it is left out (pip install timm)")
    rows: list[Row] = []
    for name in options.models:
        config = model_config(name, **(TINY if options.tiny else {}))
        batch_size = options.batch_size or (4 if options.tiny else BATCH_SIZES.get(name, 128))
        try:
            rows += measure(config, batch_size, options.steps, contenders, device)
        except torch.OutOfMemoryError:
            print(f"- {name}: batch {batch_size} does not fit into the GPU's memory: give a smaller --batch-size")
        gc.collect()
        torch._dynamo.reset()
    print_table(rows)
    if options.json:
        options.json.write_text(json.dumps({"header": facts, "rows": [asdict(row) for row in rows]}, indent=1))
    leave()
    return 0


def arguments() -> argparse.Namespace:
    """The command line, checked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(BATCH_SIZES), metavar="NAME", help="timm's names")
    parser.add_argument("--batch-size", type=int, metavar="N", help="images a step, for every model")
    parser.add_argument("--steps", type=int, default=10, metavar="N", help="steps of a timed block (default 10)")
    parser.add_argument("--no-timm", action="store_true", help="leave timm out")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all measurements there")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help=f"{TINY_MODEL} cut to {TINY}: only to see the program run")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA device can be seen: run on a machine with a GPU, or try --device cpu --tiny")
    if options.steps < 1 or (options.batch_size or 1) < 1:
        parser.error("--steps and --batch-size must be at least 1")
    if options.tiny:
        options.models = [TINY_MODEL]
    return options


def installed(name: str) -> bool:
    """Whether the package `name` can be imported."""
    return importlib.util.find_spec(name) is not None


def measure(config: ViTConfig, batch_size: int, steps: int, contenders: list[str], device: torch.device) -> list[Row]:
    """Check vitpar, then time the contenders on one model."""
    compiled = device.type == "cuda"  # on the CPU compiling takes minutes, and speed there is not the question
    g = torch.Generator().manual_seed(SEED)
    images = torch.randn(batch_size, config.channels, config.image_size, config.image_size, generator=g)
    batch = (
        images.to(device, torch.bfloat16),
        torch.randint(0, config.num_classes, (batch_size,), generator=g).to(device),
    )
    expected = reference(config, *batch)
    makers: dict[str, Callable[[], Step]] = {
        "vitpar": lambda: vitpar_step(
            config, parse("dp1"), batch_size, device, precision="bf16", compile_blocks=compiled
        ),
        "plain": lambda: plain_step(plain_model(config, device), compiled),
        "timm": lambda: plain_step(timm_model(config, device), compiled),
    }
    running: dict[str, Callable[[], object]] = {}
    memory: dict[str, int | None] = {}
    for name in contenders:
        before = torch.cuda.memory_allocated() if device.type == "cuda" else 0
        step = makers[name]()
        first = [value.item() for value in step(*batch)]
        if name == "vitpar":
            print_difference(config.name, first, expected)
        for _ in range(WARM_UP):
            step(*batch)
        settle(device)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        step(*batch)
        settle(device)
        memory[name] = torch.cuda.max_memory_allocated() - before if device.type == "cuda" else None
        running[name] = partial(block, step, batch, steps)
    times = take_turns(running, REPEATS, partial(settle, device))
    peak = peak_flops(device, "bf16")
    rows = []
    for name in contenders:
        seconds = [s / steps for s in times[name].wall]
        mfu = config.flops * batch_size / statistics.mean(seconds) / peak if peak else None
        rows.append(Row(config.name, name, batch_size, seconds, mfu, memory[name]))
    return rows


def block(step: Step, batch: tuple[Tensor, Tensor], steps: int) -> None:
    """Several steps in a row."""
    for _ in range(steps):
        step(*batch)


def settle(device: torch.device) -> None:
    """Wait until the GPU has done all it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def reference(config: ViTConfig, images: Tensor, labels: Tensor) -> list[float]:
    """Loss and gradient norm of the initial parameters: float32 parameters cast to bf16, no wrapper, no compiler."""
    model = plain_model(config, images.device)
    computed = {name: p.to(torch.bfloat16) for name, p in model.named_parameters()}
    loss = F.cross_entropy(torch.func.functional_call(model, computed, (images,)).float(), labels)
    loss.backward()
    return [loss.item(), torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()]


def print_difference(model: str, values: list[float], expected: list[float]) -> None:
    """Say how far vitpar's first loss and gradient norm are from the unwrapped ViT's."""
    parts = [
        f"{what} {a:.6f} against {b:.6f} (relative difference {abs(a - b) / abs(b):.1e})"
        for what, a, b in zip(("loss", "gradient norm"), values, expected, strict=True)
    ]
    print(f"- {model}, first step, vitpar against the unwrapped ViT in bf16: {', '.join(parts)}", flush=True)


def plain_model(config: ViTConfig, device: torch.device) -> nn.Module:
    """The unwrapped ViT with the parameters that vitpar starts from, float32."""
    model = ViT(config).to(device)
    initialise(model, SEED, config)
    return model


def timm_model(config: ViTConfig, device: torch.device) -> nn.Module:
    """timm's model of the same shape."""
    import timm

    model = timm.create_model(
        config.name, num_classes=config.num_classes, img_size=config.image_size, depth=config.depth
    ).to(device)
    with torch.device("meta"):
        ours = sum(p.numel() for p in ViT(config).parameters())
    theirs = sum(p.numel() for p in model.parameters())
    assert ours == theirs, f"{config.name} has {theirs} parameters in timm and {ours} in vitpar: not the same model"
    return model


def plain_step(model: nn.Module, compiled: bool) -> Step:
    """The loop that everyone writes: autocast, backward, clip, fused AdamW."""
    optimizer = torch.optim.AdamW(decay_groups(model), lr=LR, betas=BETAS, eps=EPS, fused=True)
    forward = torch.compile(model) if compiled else model

    def step(images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast(images.device.type, torch.bfloat16):
            loss = F.cross_entropy(forward(images), labels)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach(), norm

    return step


def print_table(rows: list[Row]) -> None:
    """All rows in Markdown."""
    ours = {row.model: row.seconds for row in rows if row.contender == "vitpar"}
    lines = [COLUMNS, ["---"] * len(COLUMNS), *(row.cells(ours[row.model]) for row in rows)]
    print()
    for line in lines:
        print(f"| {' | '.join(line)} |")


if __name__ == "__main__":
    sys.exit(main())
