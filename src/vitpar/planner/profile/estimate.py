"""A model's profile by arithmetic, for a machine of which only rates are known.

Memory is counted exactly to a few tensors. Time is a roofline: matrix products at the rate of large ones, attention at
a part of that, and at the rate of memory what the other operations and the edges of products read and write. The
constants below are the whole model; `experiments/calibration.py` compares it with published runs.
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
"""Seconds of the host to start an eager operation: a layer takes no less than to start its operations."""
GAP = 2e-6
"""Seconds of the device between two kernels, the last tiles of a product included."""
LAUNCHES: dict[LayerKind, int] = {"embed": 8, "block": 24, "head": 10}
"""Eager operations of a forward; backward has twice as many. Compiled blocks have half."""
ATTENTION = 0.55
"""Rate of attention where tokens fill its tiles, over that of a large product: 220 TFLOP/s with 197 tokens and 170 with
257 on an H200, which are assumed, not measured."""
ATTENTION_TILE = 128
"""Tokens of a tile: 197 tokens take as long as 256."""
EAGER = 1.75
"""Bytes that eager operations outside products read and write, relative to compiled ones (54 × tokens × embed_dim per
block).

Fitted to B/16 and H/14 on an RTX 3090.
"""
QUANTISING = {True: 2.0, False: 14.0}
"""How often fp8 reads or writes a product's inputs to scale them, if compiled or not. Counted in `parallel.float8`."""
UPDATE_BYTES = OPTIMIZER_BYTES + 12
"""Read and written for a float32 parameter in a step: AdamW, the norm (4), clipping (8)."""
COPY_BYTES = 12
"""Bytes read and written per parameter for its 16-bit copy and for the gradient of the copy."""
SCALING_LOSS = 0.012
"""Part of computing that is lost to late ranks with every doubling of the nodes: 94 to 96 % is published for weak
scaling from 8 to 128 GPUs."""
ERROR_BAND = 0.16
"""Mean relative error of images a second on published runs that nothing here was fitted to
(experiments/results/calibration_2026-11-23.md)."""
FLOAT8 = "float8_e4m3fn"
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


class _Product(NamedTuple):
    """A product with a weight, for one row. taken, given: elements of its input and of its output."""

    flops: float
    taken: float
    given: float


@dataclass(frozen=True)
class _Counts:
    """Work of one row (an image that a tensor-parallel group works on) on one of the group's ranks."""

    products: tuple[_Product, ...]
    """FLOPs of products with weights."""
    attention: float
    """FLOPs of attention."""
    touched: float
    """Elements that the other operations read and write, if compiled."""
    saved: float
    """Elements kept for backward."""
    workspace: float
    """Transient elements on top of `saved`."""


def tensors(config: ViTConfig, ranks: int) -> tuple[str, ...]:
    """The tensor-parallel parts of strategies for stages of up to `ranks` ranks that fit the model, `tp1` first, as
    model profiles name them (under 2.5d each square computes as in 2d)."""
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
    """The profile of `config` in `precision` on a machine with the rates of `hardware`.

    tensors: the tensor-parallel parts of strategies, such as tp4+2d; those that fit the model. compiled: whether blocks
    are. Raises PlannerError where the machine has no such rates.
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
    """Elements of parameters that a rank computes a layer with."""
    return layer_elements(config, "blocks.0" if kind == "block" else kind, strategy).compute_numel


@dataclass(frozen=True)
class _Time:
    """How long a layer takes. float8: the products forward and of inputs' gradients, None if as the others. counts:
    without a checkpoint. operations: of a forward."""

    matmul: Matmul
    float8: Matmul | None
    copy: Curve
    counts: _Counts
    itemsize: int
    operations: float
    compiled: bool

    def curves(self, parts: int, policy: str) -> tuple[Curve, Curve]:
        """Forward and backward, over rows in multiples of `parts`."""
        again = {"none": 0.0, "full": 1.0, "selective": 0.3}[policy]
        sizes = [rows * parts for rows in ROWS]
        once = {rows: self._seconds(rows, forward=True) for rows in sizes}
        backward = exact((rows, self._seconds(rows, forward=False) + again * once[rows]) for rows in sizes)
        return Curve(timings=exact(once.items())), Curve(timings=backward)

    def _seconds(self, rows: int, forward: bool) -> float:
        """Backward has two products and twice the work of everything else for one of forward."""
        counts, times = self.counts, 1 if forward else 2
        rates = [self.float8 or self.matmul] + [self.matmul] * (not forward)
        computed = sum(rate.seconds(rows * product.flops) for rate in rates for product in counts.products)
        if counts.attention:
            computed += times * self.matmul.seconds(rows * counts.attention) / ATTENTION
        # A product that has begun reads, and one that ends writes, while little is computed: as long as it takes to
        # move the larger of its two sides. So narrow products are slower.
        touched = times * (counts.touched * (1 if self.compiled else EAGER) + sum(max(p[1:]) for p in counts.products))
        if self.float8:
            scaled = sum(product.taken if forward else product.given for product in counts.products)
            touched += QUANTISING[self.compiled] * scaled
        computed += self.copy.seconds(rows * touched * self.itemsize)
        operations = times * self.operations
        return max(computed + operations * GAP, operations * LAUNCH)


def _counts(config: ViTConfig, kind: LayerKind, strategy: Strategy, policy: str) -> _Counts:
    d, h, s, t = config.embed_dim, config.mlp_hidden_dim, config.tokens, strategy.degree("tp")
    parts = 1 if strategy.tensor_mode == "1d" and not strategy.sequence_parallel else t  # of what is between products
    side = dict(strategy.tensor_shape)["j"]  # a rank's part of input and output, where a product splits features
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
        less = sum(_kept(d, h, strategy, policy))
        space = max(space, kept + space - less + (d / parts if policy == "selective" else 0))
        kept = less
    touched = 8 * d / parts + (2 * d + 2 * h) / t
    tile = min(ATTENTION_TILE, max(16, 1 << (s - 1).bit_length()))
    padded = -(-s // tile) * tile
    return _Counts(products, 4 * padded**2 * d / t, s * touched, s * kept, s * space)


def _kept(d: int, h: int, strategy: Strategy, policy: str) -> Iterator[float]:
    """Elements of a token that a block keeps for backward; its own output is among them, its input is not."""
    t, q = strategy.degree("tp"), dict(strategy.tensor_shape)["j"]
    mode = "sp" if strategy.sequence_parallel else strategy.tensor_mode
    inside = {"1d": 1, "sp": t}.get(mode, t)  # parts of what is between the products
    yield d / inside  # the output
    if policy == "full":
        return
    if policy == "none":
        yield 3 * d / inside  # two norms' outputs, and the residual between them
        yield (4 * d + 2 * h) / t  # queries, keys, values, attention, and around the activation function
        if mode not in ("1d", "sp"):
            yield 2 * d / t  # norms keep what they multiply by their scales
        return
    yield (4 * d + h) / t  # queries, keys, values, attention, hidden features
    if mode == "1d":
        yield 2 * d * (2 if t > 1 else 1)  # the products that leave the branches, and their sums
    elif mode == "sp":
        yield 2 * d + 2 * d / t + 2 * d  # the same in parts, and what was gathered
    elif mode == "3d":
        yield (3 * d + h) / q**2 + (5 * d + h) / q**2 + 2 * d / t  # gathered, and products before they are summed
    else:
        yield 2 * d / t + (3 * d + h) / q


def _space(config: ViTConfig, strategy: Strategy) -> float:
    """Elements of a token that a block takes on top, at most."""
    d, h, t, q = config.embed_dim, config.mlp_hidden_dim, strategy.degree("tp"), dict(strategy.tensor_shape)["j"]
    if strategy.tensor_mode == "3d":
        return 2 * h / q**2 + h / t + 2 * d / t
    if strategy.tensor_mode != "1d":
        return 3 * h / q + h / t
    return max(2 * d, h / t) if strategy.sequence_parallel else h / t
