"""Which kernel computes attention: the one that is named, or the fastest that runs here.

| name      | kernel                                   | devices    |
|-----------|------------------------------------------|------------|
| flash     | FlashAttention-2; on CPUs torch's own    | CUDA, CPU  |
| cudnn     | cuDNN's                                  | CUDA       |
| efficient | memory-efficient attention of xFormers   | CUDA       |
| math      | matrix products, all weights in memory   | CUDA, CPU  |

torch takes the first that can do a shape, in an order of its own, which is not the order of their speed: on Hopper GPUs
cuDNN's is often ahead of FlashAttention-2, on others behind it.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from einops import rearrange
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from vitpar.errors import RecipeError
from vitpar.launch.world_group import all_reduce_
from vitpar.models.config import ViTConfig
from vitpar.parallel.precision import Precision
from vitpar.strategy import Plan, batch_arithmetic

CANDIDATES = ("cudnn", "flash", "efficient")
"""Kernels that are tried on a GPU if none is named."""
KNOWN = {"cuda": ("cudnn", "flash", "efficient", "math"), "cpu": ("flash", "math")}
WARM_UP, READINGS, TIMES = 3, 5, 5
CLEARLY = 0.97
"""Relative time, compared with the first candidate, below which another one is chosen."""


@dataclass(frozen=True)
class AttentionChoice:
    """Kernel that computes attention, and how it was chosen."""

    backend: str | None = None
    """Name of the kernel; None for torch's own choice."""
    seconds: tuple[tuple[str, float], ...] = ()
    """Seconds of attention forward and backward in one block by kernel tried, on the slowest rank; not finite for a
    kernel that cannot compute the shape."""
    warning: str | None = None
    """Warning to show, if a GPU has no fused kernel for the shape."""

    def to_json(self) -> dict[str, object]:
        """Return the record for env.json: milliseconds by kernel, None for a kernel that did not run."""
        tried = {name: round(1e3 * s, 4) if math.isfinite(s) else None for name, s in self.seconds}
        return {"backend": self.backend or "torch's choice", "milliseconds": tried}


def choose_attention(
    wanted: str,
    config: ViTConfig,
    plan: Plan,
    batch_size: int,
    precision: Precision,
    device: torch.device,
    kept: str | None = None,
) -> AttentionChoice:
    """Let attention be computed by `wanted`: a name of the table, or "auto" for the fastest on a GPU and torch's choice
    on a CPU. Collective; equal on all ranks.

    kept: what a run that goes on had before, which it keeps where it runs here. Raises RecipeError where what is named
    cannot do the model's shape and precision on this device.
    """
    refuse_attention(wanted, device.type)
    if wanted == "auto" and device.type == "cpu":
        use_attention(None)
        return AttentionChoice()
    known = KNOWN[device.type]
    tries = [(wanted,)] if wanted != "auto" else [(kept,), CANDIDATES] if kept in known else [CANDIDATES]
    for names in tries:
        seconds = probe(names, config, plan, batch_size, precision, device)
        if (best := _fastest(seconds)) is not None:
            use_attention(best, math=best == "math" or device.type == "cpu")
            return AttentionChoice(best, tuple(seconds.items()))
    shape = f"heads of {config.embed_dim // config.num_heads} features in {precision.compute}"
    if wanted != "auto":
        raise RecipeError(
            f"train.attention '{wanted}' does not support {shape} on this {device.type} device, or runs out of memory: "
            "use auto"
        )
    use_attention(None)
    warning = (
        f"no attention kernel supports {shape} on this GPU (tried {', '.join(seconds)}), only matrix products, which "
        "store tokens x tokens weights per head: use bf16, or heads of 64 or 128 features"
    )
    return AttentionChoice(None, tuple(seconds.items()), warning)


def _fastest(seconds: dict[str, float]) -> str | None:
    """The first, unless another is clearly faster: small shapes take as long as it takes to start them."""
    able = [name for name in seconds if math.isfinite(seconds[name])]
    if not able:
        return None
    best = min(able, key=lambda name: seconds[name])
    return best if seconds[best] < CLEARLY * seconds[able[0]] else able[0]


def refuse_attention(wanted: str, device_type: str) -> None:
    """Raise RecipeError for a name that no device of this type computes."""
    known = KNOWN[device_type]
    if wanted not in ("auto", *known):
        raise RecipeError(
            f"train.attention '{wanted}' does not run on a {device_type} device: use auto, {' or '.join(known)}"
        )


def use_attention(backend: str | None, *, math: bool = True) -> None:
    """Let all attention of this process be computed by `backend`; None: as torch chooses.

    math: whether plain matrix products stand in where `backend` cannot compute a shape. On GPUs they must not: they
    need memory quadratic in the tokens. torch then raises "No available kernel".

    A compiled graph keeps the kernel that it was traced with, and neither torch's guards nor its cache on disk know of
    the choice: what was compiled under another is dropped, and the cache is told.
    """
    _enable(backend, math=math)
    tag = f"attention={backend}" if backend else ""
    if torch.compiler.config.cache_key_tag != tag:
        torch.compiler.config.cache_key_tag = tag
        torch.compiler.reset()


def probe(
    names: Sequence[str],
    config: ViTConfig,
    plan: Plan,
    batch_size: int,
    precision: Precision,
    device: torch.device,
) -> dict[str, float]:
    """Seconds of attention forward and backward in one block, for one rank's part of a micro-batch, by each of `names`;
    infinite for those that cannot, or for which there is no memory. Collective: the slowest rank's."""
    rows = max(1, batch_arithmetic(plan, batch_size).microbatch_rows // plan.stage_size)
    shape = (rows, config.tokens, 3 * config.embed_dim)
    mine = [_seconds(name, shape, config.num_heads, precision.compute, device) for name in names]
    _enable(None, math=True)
    seconds = torch.tensor(mine, dtype=torch.float64, device=device)
    all_reduce_(seconds, dist.ReduceOp.MAX)
    return dict(zip(names, seconds.tolist(), strict=True))


def _enable(backend: str | None, *, math: bool) -> None:
    cuda = torch.backends.cuda
    cuda.enable_flash_sdp(backend in (None, "flash"))
    cuda.enable_cudnn_sdp(backend in (None, "cudnn"))
    cuda.enable_mem_efficient_sdp(backend in (None, "efficient"))
    cuda.enable_math_sdp(math)


def _seconds(backend: str, shape: tuple[int, int, int], heads: int, dtype: torch.dtype, device: torch.device) -> float:
    _enable(backend, math=backend == "math")  # or what cannot do it would seem to
    with warnings.catch_warnings(action="ignore"):  # why a kernel cannot
        try:
            qkv = torch.randn(shape, dtype=dtype, device=device, requires_grad=True)
            for _ in range(WARM_UP):
                _attend(qkv, heads)
            return min(_timed(qkv, heads) for _ in range(READINGS))
        except RuntimeError:  # no kernel for this shape, precision or device; no memory
            return math.inf


def _timed(qkv: Tensor, heads: int) -> float:
    _wait(qkv)
    begun = time.perf_counter()
    for _ in range(TIMES):
        _attend(qkv, heads)
    _wait(qkv)
    return (time.perf_counter() - begun) / TIMES


def _attend(qkv: Tensor, heads: int) -> None:
    """Compute attention as ``vitpar.models.vit.Attention`` does, strides included."""
    q, k, v = rearrange(qkv, "b s (h three d) -> three b h s d", three=3, h=heads).unbind(0)
    x = rearrange(scaled_dot_product_attention(q, k, v), "b h s d -> b s (h d)")
    torch.autograd.grad(x, qkv, x.detach())


def _wait(tensor: Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)
