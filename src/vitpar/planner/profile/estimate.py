"""Model profile by arithmetic, for hardware of which only rates are known.

Memory is counted tensor by tensor. Time is a roofline: matrix products run at the rate of large ones, attention at a
share of that rate. Bytes read and written by other operations and at the edges of products move at the memory's rate.
All constants of the estimate are below; `experiments/calibration.py` compares it with published runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import NamedTuple

from vitpar.errors import PlannerError, StrategyError
from vitpar.models.config import ViTConfig
from vitpar.parallel.precision import PRECISIONS
from vitpar.planner.cost.elements import layer_elements
from vitpar.planner.profile.profiles import (
    CHECKPOINTS,
    OPTIMIZER_BYTES,
    Bytes,
    Curve,
    Hardware,
    LayerKind,
    LayerProfile,
    Matmul,
    ModelProfile,
    WeightProfile,
    always_wrapped,
    exact,
)
from vitpar.strategy import Strategy, parse, validate
from vitpar.strategy.layout import row_parts
from vitpar.text import divisors

LAUNCH = 5e-6
"""Host seconds to launch an eager operation; a lower bound on a layer's time is the launch of all its operations."""
GAP = 2e-6
"""Device seconds between two kernels, including the idle time in a product's last wave of tiles."""
LAUNCHES: dict[LayerKind, int] = {"embed": 8, "block": 24, "head": 10}
"""Eager operations of a forward. Backward has twice as many; compiled blocks have half."""
ATTENTION = 0.55
"""Rate of attention with full tiles, relative to a large product. Assumed, not measured: it gives 220 TFLOP/s with 197
tokens and 170 with 257 on an H200."""
ATTENTION_TILE = 128
"""Tokens of an attention tile: 197 tokens take as long as 256."""
EAGER = 1.75
"""Bytes that eager operations other than products read and write, relative to compiled ones. Those move 54 × tokens ×
embed_dim elements per block.

Fitted to B/16 and H/14 on an RTX 3090.
"""
QUANTISING = {True: 2.0, False: 14.0}
"""Passes over a product's inputs that scale them for fp8, by whether blocks are compiled. Counted in
`parallel.float8`."""
UPDATE_BYTES = OPTIMIZER_BYTES + 12
"""Bytes read and written per float32 parameter in a step: AdamW, the norm (4), clipping (8)."""
COPY_BYTES = 12
"""Bytes read and written per parameter for its 16-bit copy and for the gradient of the copy."""
SCALING_LOSS = 0.012
"""Share of computing lost to stragglers with every doubling of the nodes. Published weak scaling from 8 to 128 GPUs is
94 to 96 %."""
ERROR_BAND = 0.16
"""Mean relative error of images per second on published runs to which nothing here was fitted
(experiments/results/calibration_2026-11-23.md)."""
FLOAT8 = "float8_e4m3fn"
"""Key of the rate of fp8 products in a data sheet."""
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


class _Product(NamedTuple):
    """A matrix product with a weight, for one row, on one rank."""

    flops: float
    """FLOPs of the forward."""
    taken: float
    """Elements of the input."""
    given: float
    """Elements of the output."""


@dataclass(frozen=True)
class _Counts:
    """Work of one row (an image that a tensor-parallel group works on) on one of the group's ranks."""

    products: tuple[_Product, ...]
    """Products with weights."""
    attention: float
    """FLOPs of attention in forward."""
    touched: float
    """Elements that all other operations read and write in forward, if compiled."""
    saved: float
    """Elements kept for backward."""
    workspace: float
    """Transient elements on top of `saved`."""


def tensors(config: ViTConfig, ranks: int) -> tuple[str, ...]:
    """Return the names of the tensor-parallel parts that fit the model, for stages of up to `ranks` ranks, tp1 first.

    2.5d is not among them: each of its squares computes as 2d, and shares that profile.
    """
    found = ["tp1"]
    for degree in divisors(ranks)[1:]:
        for flag in ("", "+sp", "+2d", "+3d"):
            with suppress(StrategyError):
                validate(parse(f"tp{degree}{flag}"), config, None)
                found.append(f"tp{degree}{flag}")
    return tuple(found)


def estimate_model(
    config: ViTConfig, precision: str, hardware: Hardware, tensors: tuple[str, ...], *, compiled: bool = False
) -> ModelProfile:
    """Return the estimated profile of `config` in `precision`.

    hardware: rates of matrix products and copies.
    tensors: tensor-parallel parts of strategies, such as tp4+2d, that fit the model.
    compiled: whether blocks are compiled.

    Raises PlannerError if the hardware profile lacks these rates.
    """
    copy = hardware.copy_
    if copy is None or not hardware.matmuls:
        raise PlannerError(
            f"{hardware.name} has no rates to estimate a model with: profile the model, or use --cluster"
        )
    numbers = PRECISIONS[precision]
    rates = {matmul.dtype: matmul for matmul in hardware.matmuls}
    matmul = rates.get(str(numbers.compute).removeprefix("torch."), hardware.matmuls[0])
    if numbers.float8 and FLOAT8 not in rates:
        raise PlannerError(
            f"{hardware.name} has no rate of float8 matrix products: plan for bf16, or use GPUs that have it"
        )
    layers, weights = [], []
    for tensor in tensors:
        strategy = parse(tensor).strategy
        for kind in LAUNCHES:
            elements = computed_elements(config, kind, strategy)
            plain = _counts(config, kind, strategy, "none")
            float8 = rates[FLOAT8] if numbers.float8 and kind == "block" else None
            operations = LAUNCHES[kind] / (2 if compiled and kind == "block" else 1)
            time = _Time(matmul, float8, copy, plain, numbers.compute.itemsize, operations, compiled)
            for policy in CHECKPOINTS:
                counts = _counts(config, kind, strategy, policy)
                forward, backward = time.curves(row_parts(strategy), policy)
                for wrapped in (True,) if always_wrapped(tensor) else (False, True):
                    layers.append(
                        LayerProfile(
                            layer=kind,
                            tensor=tensor,
                            checkpoint=policy,
                            wrapped=wrapped,
                            forward=forward,
                            backward=backward,
                            input_share=0.5 if kind != "embed" else 0.0,
                            saved=Bytes(fixed=0, per_row=counts.saved * time.itemsize),
                            # A weight's gradient is transient until it is accumulated. The largest weight of a block
                            # has about a third of its elements.
                            workspace=Bytes(
                                fixed=elements / 3 * time.itemsize, per_row=counts.workspace * time.itemsize
                            ),
                        )
                    )
            moved = copy.seconds(4 * elements * numbers.parameters.itemsize)
            (gather,) = exact([(elements, moved)])
            weights.append(WeightProfile(layer=kind, tensor=tensor, elements=elements, gather=gather, reduce=moved))
    blocks = "blocks compiled" if compiled else "blocks not compiled"
    update = UPDATE_BYTES + (COPY_BYTES if numbers.compute is not numbers.parameters else 0)
    profile = ModelProfile(
        model=asdict(config),
        device=hardware.device,
        device_name=hardware.device_name,
        precision=precision,
        compiled=compiled,
        processes=1,
        threads=hardware.threads,
        cores=1 if hardware.device == "cuda" else hardware.threads * hardware.ranks,
        layers=tuple(layers),
        weights=tuple(weights),
        optimizer=Curve(timings=exact((n, copy.seconds(update * n)) for n in (2**20, 2**30))),
        microbatch=40 * LAUNCH,
        error_band=ERROR_BAND,
        measured={"estimated": f"by arithmetic, from the rates of {hardware.name}, {blocks}"},
    )
    return profile.slower(1 + SCALING_LOSS * math.log2(hardware.ranks / hardware.ranks_per_node), 1.0)


def computed_elements(config: ViTConfig, kind: LayerKind, strategy: Strategy) -> int:
    """Return the parameter elements that a rank computes a layer with: gathered, but split over tensor axes."""
    return layer_elements(config, "blocks.0" if kind == "block" else kind, strategy).compute_numel


@dataclass(frozen=True)
class _Time:
    """Roofline estimate of a layer's time."""

    matmul: Matmul
    """Rate of products in the compute dtype."""
    float8: Matmul | None
    """Rate of products in forward and for gradients of inputs in fp8; None if these use `matmul` too."""
    copy: Curve
    """Rate of memory."""
    counts: _Counts
    """Work of one row, without checkpointing."""
    itemsize: int
    """Bytes of an element."""
    operations: float
    """Kernels of a forward."""
    compiled: bool
    """Whether blocks are compiled."""

    def curves(self, parts: int, policy: str) -> tuple[Curve, Curve]:
        """Return the times of (forward, backward) over rows.

        parts: the numbers of rows are multiples of it.
        policy: checkpointing policy, which adds its share of a forward to backward.
        """
        again = {"none": 0.0, "full": 1.0, "selective": 0.3}[policy]
        sizes = [rows * parts for rows in ROWS]
        once = {rows: self._seconds(rows, forward=True) for rows in sizes}
        backward = exact((rows, self._seconds(rows, forward=False) + again * once[rows]) for rows in sizes)
        return Curve(timings=exact(once.items())), Curve(timings=backward)

    def _seconds(self, rows: int, forward: bool) -> float:
        """Return the seconds of `rows` rows in forward or backward."""
        # Backward has two products (for gradients of inputs and of weights) for one of forward, and twice the rest.
        counts, times = self.counts, 1 if forward else 2
        rates = [self.float8 or self.matmul] + [self.matmul] * (not forward)
        computed = sum(rate.seconds(rows * product.flops) for rate in rates for product in counts.products)
        if counts.attention:
            computed += times * self.matmul.seconds(rows * counts.attention) / ATTENTION
        # At its start a product mostly reads and at its end mostly writes, while few FLOPs are computed. This costs the
        # time to move the larger of input and output, so narrow products are slower.
        touched = times * (counts.touched * (1 if self.compiled else EAGER) + sum(max(p[1:]) for p in counts.products))
        if self.float8:
            scaled = sum(product.taken if forward else product.given for product in counts.products)
            touched += QUANTISING[self.compiled] * scaled
        computed += self.copy.seconds(rows * touched * self.itemsize)
        operations = times * self.operations
        return max(computed + operations * GAP, operations * LAUNCH)


def _counts(config: ViTConfig, kind: LayerKind, strategy: Strategy, policy: str) -> _Counts:
    """Return the work of one row under a tensor-parallel mode and a checkpointing policy."""
    d, h, s, t = config.embed_dim, config.mlp_hidden_dim, config.tokens, strategy.degree("tp")
    # Parts that activations outside the products are split into.
    parts = 1 if strategy.tensor_mode == "1d" and not strategy.sequence_parallel else t
    # A product's input and output are split into `sides` parts; the next product swaps them.
    side = dict(strategy.tensor_shape)["j"]
    sides = {"2d": (side, side), "3d": (side**2, side**2)}.get(strategy.tensor_mode, (1, t))
    if kind == "embed":
        pixels = config.patches * config.channels * config.patch_size**2
        saved = (s * d + (0 if policy == "full" else pixels)) / parts
        product = _Product(2 * pixels * d / parts, pixels / parts, config.patches * d / parts)
        return _Counts((product,), 0.0, 4 * s * d / parts, saved, s * d / parts)
    if kind == "head":
        pooled = s if config.pool == "avg" else 1
        product = _Product(2 * d * config.num_classes / t, d, config.num_classes / t)
        return _Counts((product,), 0.0, 3 * s * d / parts, 2 * pooled * d / parts, s * d / parts)
    products = tuple(
        _Product(2 * s * taken * given / t, s * taken / inner, s * given / outer)
        for taken, given, inner, outer in (
            (d, 3 * d, *sides),
            (d, d, *sides[::-1]),
            (d, h, *sides),
            (h, d, *sides[::-1]),
        )
    )
    kept, space = sum(_kept(d, h, strategy, "none")), _space(config, strategy)
    if policy != "none":
        # Backward recomputes what was not kept: it is alive while the layer computes, as workspace.
        less = sum(_kept(d, h, strategy, policy))
        space = max(space, kept + space - less + (d / parts if policy == "selective" else 0))
        kept = less
    touched = 8 * d / parts + (2 * d + 2 * h) / t
    # Few tokens use a smaller tile: the next power of two, at least 16.
    tile = min(ATTENTION_TILE, max(16, 1 << (s - 1).bit_length()))
    padded = -(-s // tile) * tile
    return _Counts(products, 4 * padded**2 * d / t, s * touched, s * kept, s * space)


def _kept(d: int, h: int, strategy: Strategy, policy: str) -> Iterator[float]:
    """Yield the elements per token that a block keeps for backward: its output included, its input not."""
    t, q = strategy.degree("tp"), dict(strategy.tensor_shape)["j"]
    mode = "sp" if strategy.sequence_parallel else strategy.tensor_mode
    inside = {"1d": 1, "sp": t}.get(mode, t)  # parts that activations outside the products are split into
    yield d / inside  # the output
    if policy == "full":
        return
    if policy == "none":
        yield 3 * d / inside  # outputs of the two norms, and the residual between the branches
        yield (4 * d + 2 * h) / t  # queries, keys, values, attention, and input and output of the activation function
        if mode not in ("1d", "sp"):
            yield 2 * d / t  # normalised inputs, which split norms multiply by their scales
        return
    # selective: results of products, attention and communication
    yield (4 * d + h) / t  # queries, keys, values, attention, hidden features
    if mode == "1d":
        yield 2 * d * (2 if t > 1 else 1)  # the last product of each branch, and its sum over the ranks
    elif mode == "sp":
        yield 2 * d + 2 * d / t + 2 * d  # the same before and after its reduce-scatter, and the gathered inputs
    elif mode == "3d":
        yield (3 * d + h) / q**2 + (5 * d + h) / q**2 + 2 * d / t  # gathered inputs, and products before their sum
    else:
        yield 2 * d / t + (3 * d + h) / q


def _space(config: ViTConfig, strategy: Strategy) -> float:
    """Return the peak of transient elements per token on top of what a block keeps for backward."""
    d, h, t, q = config.embed_dim, config.mlp_hidden_dim, strategy.degree("tp"), dict(strategy.tensor_shape)["j"]
    if strategy.tensor_mode == "3d":
        return 2 * h / q**2 + h / t + 2 * d / t
    if strategy.tensor_mode != "1d":
        return 3 * h / q + h / t
    return max(2 * d, h / t) if strategy.sequence_parallel else h / t
