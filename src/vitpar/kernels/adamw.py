"""One pass of AdamW over many tensors: clipping, update, 16-bit copy and running average.

Each element is read and written once. torch's own operations take four passes: they multiply gradients by the clipping
factor, update parameters, copy them to 16 bits, and average them.

One kernel updates all tensors. It finds them by a table of their addresses, which is sent to the device in every step
because gradients move. A program of the kernel updates one chunk of a tensor. Chunks that are full, of tensors at
addresses that vector instructions accept, need no masks: they are a launch of their own.

| bytes a parameter             | read | written |
|-------------------------------|------|---------|
| parameter and two moments     | 12   | 12      |
| gradient in float32 or 16 bit | 4, 2 |         |
| copy in 16 bit                |      | 2       |
| running average               | 4    | 4       |
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = 2048
"""Elements of a chunk."""
WARPS = 8
"""Warps of a program: a thread then has two vectors of four floats of each tensor."""
ALIGNED = 16
"""Bytes that the address of a tensor must be a multiple of for vector instructions."""
DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
"""Triton's data types of gradients and copies."""


@triton.jit
def _rows(table, tensor, offsets, row: tl.constexpr, tensors, dtype: tl.constexpr, full: tl.constexpr):
    """Return pointers to elements of the tensor whose address is in a row of the table."""
    pointer = tl.load(table + row * tensors + tensor).to(tl.pointer_type(dtype))
    if full:
        pointer = tl.multiple_of(pointer, 16)
    return pointer + offsets


@triton.jit
def _adamw_kernel(
    table,  # int64 [rows, tensors]: addresses of parameters, gradients, moments, copies and averages; elements
    rates,  # float32 [3, tensors]: learning rate x weight decay, learning rate / first bias, root of the second bias
    chunks,  # int32 [programs, 2]: tensor, number of the chunk in it
    factor,  # float32 []: multiplies gradients
    tensors,
    new1,  # 1 - beta1
    beta2,
    new2,  # 1 - beta2
    eps,
    new_average,  # 1 - decay of the running average
    gradient_dtype: tl.constexpr,
    copy_dtype: tl.constexpr,
    multiplies: tl.constexpr,
    copies: tl.constexpr,
    averages: tl.constexpr,
    full: tl.constexpr,
    size: tl.constexpr,
):
    tensor = tl.load(chunks + 2 * tl.program_id(0))
    start = tl.load(chunks + 2 * tl.program_id(0) + 1).to(tl.int64) * size
    offsets = tl.multiple_of(start, size) + tl.arange(0, size)
    inside = None if full else offsets < tl.load(table + 6 * tensors + tensor)
    parameters = _rows(table, tensor, offsets, 0, tensors, tl.float32, full)
    gradients = _rows(table, tensor, offsets, 1, tensors, gradient_dtype, full)
    firsts = _rows(table, tensor, offsets, 2, tensors, tl.float32, full)
    seconds = _rows(table, tensor, offsets, 3, tensors, tl.float32, full)
    p, g = tl.load(parameters, mask=inside), tl.load(gradients, mask=inside).to(tl.float32)
    m, v = tl.load(firsts, mask=inside), tl.load(seconds, mask=inside)
    if multiplies:
        g *= tl.load(factor)
    decay, step = tl.load(rates + tensor), tl.load(rates + tensors + tensor)
    root = tl.load(rates + 2 * tensors + tensor)
    p -= decay * p
    m += new1 * (g - m)
    v = beta2 * v + new2 * g * g
    p -= step * tl.div_rn(m, tl.div_rn(tl.sqrt_rn(v), root) + eps)
    tl.store(parameters, p, mask=inside)
    tl.store(firsts, m, mask=inside)
    tl.store(seconds, v, mask=inside)
    if copies:
        tl.store(_rows(table, tensor, offsets, 4, tensors, copy_dtype, full), p.to(copy_dtype), mask=inside)
    if averages:
        kept = _rows(table, tensor, offsets, 5, tensors, tl.float32, full)
        a = tl.load(kept, mask=inside)
        tl.store(kept, a + new_average * (p - a), mask=inside)


@torch.library.custom_op(
    "vitpar::adamw_", mutates_args=("parameters", "exp_avgs", "exp_avg_sqs", "copies", "averages"), device_types=None
)
def adamw_(
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    copies: Sequence[Tensor],
    averages: Sequence[Tensor],
    factor: Tensor | None,
    steps: Sequence[float],
    lrs: Sequence[float],
    weight_decays: Sequence[float],
    beta1: float,
    beta2: float,
    eps: float,
    average_decay: float,
) -> None:
    """Update tensors in one pass.

    parameters, exp_avgs, exp_avg_sqs: float32, contiguous, with elements, on one device.
    gradients: contiguous, all float32, bfloat16 or float16. They are not changed.
    copies: the new parameters are written there in one 16-bit type; none for no copies.
    averages: running averages in float32, updated with the new parameters; none for no averages.
    factor: 0-dim float32 on the device that multiplies gradients; None for 1.
    steps, lrs, weight_decays: number of each tensor's update, counted from 1, its learning rate and its weight decay.
    average_decay: ``average = decay * average + (1 - decay) * parameter``.
    """
    device, tensors = parameters[0].device, len(parameters)
    lists = [parameters, gradients, exp_avgs, exp_avg_sqs, copies or parameters, averages or parameters]
    addresses = [[tensor.data_ptr() for tensor in one] for one in lists]
    sizes = tuple(tensor.numel() for tensor in parameters)
    aligned = tuple(not any(address % ALIGNED for address in column) for column in zip(*addresses, strict=True))
    first, second = ([1 - beta**step for step in steps] for beta in (beta1, beta2))
    rates = [
        [lr * decay for lr, decay in zip(lrs, weight_decays, strict=True)],
        [lr / bias for lr, bias in zip(lrs, first, strict=True)],
        [math.sqrt(bias) for bias in second],
    ]
    table, scalars = _sent([*addresses, list(sizes)], torch.int64, device), _sent(rates, torch.float32, device)
    for chunks, full in zip(_chunks(sizes, aligned, device), (True, False), strict=True):
        if len(chunks):
            _adamw_kernel[(len(chunks),)](
                table,
                scalars,
                chunks,
                parameters[0] if factor is None else factor,
                tensors,
                1 - beta1,
                beta2,
                1 - beta2,
                eps,
                1 - average_decay,
                gradient_dtype=DTYPES[gradients[0].dtype],
                copy_dtype=DTYPES[copies[0].dtype if copies else torch.bfloat16],
                multiplies=factor is not None,
                copies=bool(copies),
                averages=bool(averages),
                full=full,
                size=CHUNK,
                num_warps=WARPS,
            )


@adamw_.register_fake
def _(*args: object) -> None:
    return None


def _sent(values: list[list[int]] | list[list[float]], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor of `values` on the device, without waiting for it."""
    host = torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda")
    return host.to(device, non_blocking=True)


@lru_cache(maxsize=64)
def _chunks(sizes: tuple[int, ...], aligned: tuple[bool, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the chunks that need no masks, and those that do: int32 [chunks, 2], tensor and number.

    sizes: elements of each tensor.
    aligned: whether vector instructions accept the addresses of a tensor.
    """
    full, rest = [], []
    for tensor, (size, fine) in enumerate(zip(sizes, aligned, strict=True)):
        whole, count = size // CHUNK if fine else 0, -(-size // CHUNK)
        numbers = torch.arange(count, dtype=torch.int32)
        pairs = torch.stack([torch.full_like(numbers, tensor), numbers], dim=1)
        full.append(pairs[:whole])
        rest.append(pairs[whole:])
    return torch.cat(full).to(device), torch.cat(rest).to(device)


def fault(device: torch.device) -> str | None:
    """Return the reason why the kernel does not run on `device`, None if it updates a small tensor."""
    tensors = [[torch.ones(ALIGNED, device=device)] for _ in range(4)]
    try:
        adamw_(*tensors, [], [], None, [1.0], [0.0], [0.0], 0.9, 0.999, 1e-8, 0.0)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except Exception as error:  # of any kind: a missing or broken C compiler, driver, full disk, an old GPU
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        return f"Triton does not work for this {device.type} device ({reason})"
    return None
