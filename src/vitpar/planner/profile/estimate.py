"""A model's profile by arithmetic, where there is no device to measure on: memory counted exactly to a few tensors,
time from the rates of a hardware profile.

A layer's time is that of its matrix products, and of reading and writing what the other operations touch, but no less
than launching them takes. Eager kernels are assumed; attention computes at half the rate of a product.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass

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

LAUNCH = {"cuda": 5e-6, "cpu": 5e-6}
"""Seconds to start an operation."""
LAUNCHES: dict[LayerKind, int] = {"stem": 8, "block": 24, "head": 10}
"""Operations of a forward; backward has twice as many."""
ATTENTION = 0.5
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


@dataclass(frozen=True)
class _Counts:
    """Of one row (an image that a tensor-parallel group works on), on one of its ranks.

    products: FLOPs of matrix products. attention: FLOPs. touched: elements that the other operations read and write.
    saved: elements kept for backward. workspace: elements on top of that.
    """

    products: tuple[float, ...]
    attention: float
    touched: float
    saved: float
    workspace: float


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


def estimate_model(config: ViTConfig, precision: str, hardware: Hardware, tensors: tuple[str, ...]) -> ModelProfile:
    """The profile of `config` in `precision` on a machine with the rates of `hardware`.

    tensors: the tensor-parallel parts of strategies, such as tp4+2d; those that fit the model.
    """
    copy = hardware.copy_
    if copy is None or not hardware.matmuls:
        raise PlannerError(
            f"{hardware.name} has no rates to estimate a model from: profile the model, or use --cluster"
        )
    numbers = PRECISIONS[precision]
    if numbers.float8:
        raise PlannerError(f"{hardware.name} has no rates of products in float8: profile the model, or plan for bf16")
    dtype, launch = str(numbers.compute).removeprefix("torch."), LAUNCH[hardware.device]
    matmul = next((m for m in hardware.matmuls if m.dtype == dtype), hardware.matmuls[0])
    layers, weights = [], []
    for tensor in tensors:
        strategy = parse(tensor).strategy
        for kind in LAUNCHES:
            elements = computed_elements(config, kind, strategy)
            plain = _counts(config, kind, strategy, "none")
            time = _Time(matmul, copy, plain, numbers.compute.itemsize, launch * LAUNCHES[kind])
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
                            input_share=0.5 if kind != "stem" else 0.0,
                            saved=Bytes(fixed=0, per_row=counts.saved * time.itemsize),
                            workspace=Bytes(
                                fixed=elements / 3 * time.itemsize, per_row=counts.workspace * time.itemsize
                            ),
                        )
                    )
            moved = copy.seconds(4 * elements * numbers.parameters.itemsize)
            (gather,) = exact([(elements, moved)])
            weights.append(WeightProfile(layer=kind, tensor=tensor, elements=elements, gather=gather, reduce=moved))
    return ModelProfile(
        model=asdict(config),
        device=hardware.device,
        device_name=hardware.device_name,
        precision=precision,
        compiled=False,
        processes=1,
        threads=hardware.threads,
        cores=1 if hardware.device == "cuda" else hardware.threads * hardware.ranks,
        layers=tuple(layers),
        weights=tuple(weights),
        optimizer=Curve(timings=exact((n, copy.seconds(OPTIMIZER_BYTES * n)) for n in (2**20, 2**30))),
        microbatch=40 * launch,
        measured={"estimated": f"by arithmetic, from the rates of {hardware.name}"},
    )


def computed_elements(config: ViTConfig, kind: LayerKind, strategy: Strategy) -> int:
    """Elements of parameters that a rank computes a layer with."""
    return layer_elements(config, "blocks.0" if kind == "block" else kind, strategy).computed


@dataclass(frozen=True)
class _Time:
    """How long a layer takes. counts: without a checkpoint. start: seconds to launch a forward."""

    matmul: Matmul
    copy: Curve
    counts: _Counts
    itemsize: int
    start: float

    def curves(self, parts: int, policy: str) -> tuple[Curve, Curve]:
        """Forward and backward, over rows in multiples of `parts`."""
        again = {"none": 0.0, "full": 1.0, "selective": 0.3}[policy]
        sizes = [rows * parts for rows in ROWS]
        once = {rows: self._seconds(rows, 1) for rows in sizes}
        backward = exact((rows, self._seconds(rows, 2) + again * once[rows]) for rows in sizes)
        return Curve(timings=exact(once.items())), Curve(timings=backward)

    def _seconds(self, rows: int, times: float) -> float:
        """Seconds of as much computing as `times` forwards."""
        counts, matmul = self.counts, self.matmul
        products = sum(matmul.seconds(times * rows * flops) for flops in counts.products)
        attention = matmul.seconds(times * rows * counts.attention) / ATTENTION if counts.attention else 0.0
        touched = self.copy.seconds(times * rows * counts.touched * self.itemsize)
        return max(products + attention + touched, times * self.start)


def _counts(config: ViTConfig, kind: LayerKind, strategy: Strategy, policy: str) -> _Counts:
    d, h, s, t = config.width, config.hidden, config.tokens, strategy.degree("tp")
    parts = 1 if strategy.tensor_mode == "1d" and not strategy.sequence_parallel else t  # of what is between products
    if kind == "stem":
        patches = config.patches * config.channels * config.patch_size**2
        saved = (s * d + (0 if policy == "full" else patches)) / parts
        return _Counts((2 * patches * d / parts,), 0.0, 4 * s * d / parts, saved, s * d / parts)
    if kind == "head":
        pooled = s if config.pool == "avg" else 1
        return _Counts((2 * d * config.num_classes / t,), 0.0, 3 * s * d / parts, 2 * pooled * d / parts, s * d / parts)
    products = tuple(2 * s * n / t for n in (3 * d * d, d * d, d * h, d * h))
    kept, space = sum(_kept(d, h, strategy, "none")), _space(config, strategy)
    if policy != "none":
        less = sum(_kept(d, h, strategy, policy))
        space = max(space, kept + space - less + (d / parts if policy == "selective" else 0))
        kept = less
    touched = 10 * d / parts + (2 * d + 2 * h) / t
    return _Counts(products, 4 * s * s * d / t, s * touched, s * kept, s * space)


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
    d, h, t, q = config.width, config.hidden, strategy.degree("tp"), dict(strategy.tensor_shape)["j"]
    if strategy.tensor_mode == "3d":
        return 2 * h / q**2 + h / t + 2 * d / t
    if strategy.tensor_mode != "1d":
        return 3 * h / q + h / t
    return max(2 * d, h / t) if strategy.sequence_parallel else h / t
