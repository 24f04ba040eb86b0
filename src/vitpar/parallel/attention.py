"""Choice of the attention kernel: the one named in the recipe, or the fastest that runs on this device.

| name      | kernel                                   | devices    |
|-----------|------------------------------------------|------------|
| flash     | FlashAttention-2; on CPUs torch's own    | CUDA, CPU  |
| cudnn     | cuDNN's                                  | CUDA       |
| efficient | memory-efficient attention of xFormers   | CUDA       |
| packed    | vitpar's own (vitpar.kernels.attention)  | CUDA       |
| math      | matrix products, all weights in memory   | CUDA, CPU  |

By default torch takes the first kernel, in an order of its own, that supports the shape. That is not the order of their
speed: on Hopper GPUs cuDNN's is often faster than FlashAttention-2, on others slower.
"""

from __future__ import annotations

import math
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from einops import rearrange
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from vitpar.errors import RecipeError
from vitpar.launch.world_group import all_reduce_
from vitpar.models.compiled import attend_packed, packs_attention, use_packed_attention
from vitpar.models.config import ModelConfig
from vitpar.models.description import AttentionShape
from vitpar.parallel.precision import Precision
from vitpar.strategy import Plan, batch_arithmetic
from vitpar.strategy.kernels import ATTENTION_KERNELS, refuse_attention
from vitpar.text import either

CANDIDATES = ("cudnn", "flash", "efficient")
"""Kernels that are timed on a GPU if the recipe names none. Not packed, which no GPU has timed yet."""
MOST_TOKENS, WIDEST = 288, 128
"""Most tokens, and most features of a head, for packed."""
WARM_UP, READINGS, TIMES = 3, 5, 5
"""Warm-up runs, timed readings (the fastest counts), and runs per reading."""
CLEARLY = 0.97
"""Time relative to the first candidate's, below which another candidate is chosen."""


@dataclass(frozen=True)
class AttentionChoice:
    """Kernel that computes attention, and the measurements behind the choice."""

    backend: str | None = None
    """Name of the kernel; None for torch's own choice."""
    seconds: tuple[tuple[str, float], ...] = ()
    """Kernels tried, each with the seconds of one attention forward and backward on the slowest rank; infinite for a
    kernel that cannot compute the shape."""
    warning: str | None = None
    """Warning to show if a GPU has no fused kernel for the shape, else None."""

    def to_json(self) -> dict[str, object]:
        """Return the record for env.json: milliseconds by kernel, None for a kernel that did not run."""
        tried = {name: round(1e3 * s, 4) if math.isfinite(s) else None for name, s in self.seconds}
        return {"backend": self.backend or "torch's choice", "milliseconds": tried}


def choose_attention(
    wanted: str,
    config: ModelConfig,
    plan: Plan,
    batch_size: int,
    precision: Precision,
    device: torch.device,
    kept: str | None = None,
) -> AttentionChoice:
    """Choose and set the attention kernel of this process. Collective; all ranks make the same choice.

    wanted: a kernel of the table, or "auto" for the fastest on a GPU and torch's choice on a CPU.
    kept: kernel of the run that is resumed; "auto" keeps it if it runs here.

    Raises RecipeError if `wanted` does not support the model's shape and precision on this device.
    """
    refuse_attention(wanted, device.type)
    fault = _packed_fault(config, precision)
    if wanted == "packed" and fault:
        raise RecipeError(f"train.attention is packed, but {fault}: use auto")
    # A model of the user's own may compute attention, of a shape that nothing describes.
    if (wanted == "auto" and device.type == "cpu") or not any(layer.attention for layer in config.kinds.values()):
        chosen = None if wanted == "auto" else wanted
        use_attention(chosen)
        return AttentionChoice(chosen)
    tries: list[tuple[str, ...]] = [CANDIDATES] if wanted == "auto" else [(wanted,)]
    if wanted == "auto" and kept in ATTENTION_KERNELS[device.type] and (kept != "packed" or not fault):
        tries = [(kept,), CANDIDATES]
    for names in tries:
        seconds = probe(names, config, plan, batch_size, precision, device)
        if able := [name for name in names if math.isfinite(seconds[name])]:
            # The first kernel that ran, unless another is clearly faster: for small shapes the time is that of the
            # kernel launches, so the order of nearly equal times is noise.
            best = min(able, key=lambda name: seconds[name])
            best = best if seconds[best] < CLEARLY * seconds[able[0]] else able[0]
            use_attention(best, allow_math=best == "math" or device.type == "cpu")
            return AttentionChoice(best, tuple(seconds.items()))
    dims = sorted({layer.attention.head_dim for layer in config.layers.values() if layer.attention})
    shape = f"heads of {' or '.join(map(str, dims))} features in {precision.compute}"
    if wanted != "auto":
        raise RecipeError(
            f"train.attention '{wanted}' does not support {shape} on this {device.type} device, or runs out of memory"
            + ", or Triton does not work" * (wanted == "packed")
            + ": use auto"
        )
    use_attention(None)
    ways = ["bf16"] if precision.compute not in (torch.bfloat16, torch.float16) else []
    ways += ["heads of 64 or 128 features"] if not {*dims} <= {64, 128} else []
    warning = (
        f"no attention kernel supports {shape} on this GPU (tried {', '.join(seconds)}), only matrix products, which "
        f"store tokens x tokens weights per head: use {either(ways or ['another GPU'])}"
    )
    return AttentionChoice(None, tuple(seconds.items()), warning)


def _packed_fault(config: ModelConfig, precision: Precision) -> str | None:
    """Return why packed does not compute the attention of a model; None if it may."""
    shapes = [layer.attention for layer in config.layers.values() if layer.attention]
    if not (shapes and all(shape.packed for shape in shapes)):
        return "attention of this model takes more than one linear layer gives"
    if (most := max(shape.tokens for shape in shapes)) > MOST_TOKENS:
        return f"the model has {most} tokens, and packed takes up to {MOST_TOKENS}"
    if (widest := max(shape.head_dim for shape in shapes)) > WIDEST:
        return f"the model has heads of {widest} features, and packed takes up to {WIDEST}"
    if precision.compute not in (torch.bfloat16, torch.float16):
        return f"it computes in bfloat16 or float16, not in {str(precision.compute).removeprefix('torch.')}"
    return None


@contextmanager
def by_products(device: torch.device) -> Iterator[None]:
    """Compute attention inside by matrix products on a GPU, whatever kernel is chosen; on a CPU by any of torch's."""
    chosen = use_packed_attention(False)
    try:
        with sdpa_kernel(SDPBackend.MATH) if device.type == "cuda" else nullcontext():
            yield
    finally:
        use_packed_attention(chosen)


def use_attention(backend: str | None, *, allow_math: bool = True) -> None:
    """Set the attention kernel of this process. Drops compiled graphs if the kernel changes.

    backend: name of the kernel; None for torch's choice.
    allow_math: whether plain matrix products are allowed as a fallback for shapes that `backend` does not support. Not
        on GPUs, where they need memory quadratic in the tokens: without the fallback torch raises "No available
        kernel".
    """
    _enable(backend, allow_math=allow_math)
    # A compiled graph keeps the kernel that it was traced with. Neither torch's guards nor its cache on disk depend on
    # the kernel, so the choice becomes part of the cache key, and graphs traced with another kernel are dropped.
    tag = f"attention={backend}" if backend else ""
    if torch.compiler.config.cache_key_tag != tag:
        torch.compiler.config.cache_key_tag = tag
        torch.compiler.reset()


def probe(
    names: Sequence[str],
    config: ModelConfig,
    plan: Plan,
    batch_size: int,
    precision: Precision,
    device: torch.device,
) -> dict[str, float]:
    """Return the seconds of one attention forward and backward by kernel, for one rank's part of a micro-batch.

    Infinite for kernels that do not support the shape or run out of memory. Collective: returns the slowest rank's
    time.
    """
    rows = max(1, batch_arithmetic(plan, batch_size).microbatch_rows // plan.stage_size)
    # Kinds of layers without the same attention are added up, so that the kernel is the fastest for the whole model.
    shapes = Counter(layer.attention for layer in config.layers.values() if layer.attention)
    mine = [
        sum(times * _seconds(name, shape, rows, precision.compute, device) for shape, times in shapes.items())
        for name in names
    ]
    _enable(None, allow_math=True)
    seconds = torch.tensor(mine, dtype=torch.float64, device=device)
    all_reduce_(seconds, dist.ReduceOp.MAX)
    return dict(zip(names, seconds.tolist(), strict=True))


def _enable(backend: str | None, *, allow_math: bool) -> None:
    use_packed_attention(backend == "packed")
    cuda, any_of_torch = torch.backends.cuda, backend in (None, "packed")  # evaluation does not pack
    cuda.enable_flash_sdp(any_of_torch or backend == "flash")
    cuda.enable_cudnn_sdp(any_of_torch or backend == "cudnn")
    cuda.enable_mem_efficient_sdp(any_of_torch or backend == "efficient")
    cuda.enable_math_sdp(allow_math)


def _seconds(backend: str, shape: AttentionShape, rows: int, dtype: torch.dtype, device: torch.device) -> float:
    """Return the seconds of one attention forward and backward of `rows` images; infinite if the kernel cannot."""
    _enable(backend, allow_math=backend == "math")  # no fallback, or an unsupported kernel would seem to run
    size = (rows * shape.windows, shape.tokens, 3 * shape.heads * shape.head_dim)
    with warnings.catch_warnings(action="ignore"):  # torch warns why a kernel does not support the shape
        try:
            qkv = torch.randn(size, dtype=dtype, device=device, requires_grad=True)
            bias = None
            if shape.biased:
                scores = shape.heads, shape.tokens, shape.tokens
                bias = torch.randn(scores, dtype=dtype, device=device, requires_grad=True)
            for _ in range(WARM_UP):
                _attend(qkv, shape.heads, bias)
            best = math.inf
            for _ in range(READINGS):
                _wait(qkv)
                begun = time.perf_counter()
                for _ in range(TIMES):
                    _attend(qkv, shape.heads, bias)
                _wait(qkv)
                best = min(best, (time.perf_counter() - begun) / TIMES)
            return best
        except RuntimeError:  # no kernel for this shape, precision or device; no memory
            return math.inf
        except Exception:  # of any kind: Triton is missing, or its compiler or the driver is broken
            if backend == "packed":
                return math.inf
            raise


def _attend(qkv: Tensor, heads: int, bias: Tensor | None) -> None:
    """Compute attention as the models do, strides included, forward and backward."""
    if packs_attention():
        x = attend_packed(qkv, None, qkv.shape[2] // (3 * heads))
        torch.autograd.grad(x, qkv, x.detach())
        return
    q, k, v = rearrange(qkv, "b s (h three d) -> three b h s d", three=3, h=heads).unbind(0)
    x = rearrange(scaled_dot_product_attention(q, k, v, attn_mask=bias), "b h s d -> b s (h d)")
    torch.autograd.grad(x, [qkv] if bias is None else [qkv, bias], x.detach())


def _wait(tensor: Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)
