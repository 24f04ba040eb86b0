"""A model's profile by arithmetic, where there is no device to measure on: memory counted exactly to a few tensors,
time from the rates of a hardware profile.

A layer's time is that of its matrix products, and of reading and writing what the other operations touch, but no less
than launching them takes. Eager kernels are assumed; attention computes at half the rate of a product.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass

from vitpar.errors import PlannerError
from vitpar.models.config import ViTConfig
from vitpar.parallel.precision import PRECISIONS
from vitpar.planner.cost.held import layer_elements
from vitpar.planner.profile.curve import Curve, Timing
from vitpar.planner.profile.hardware import OPTIMIZER_BYTES, Hardware, Matmul
from vitpar.planner.profile.model import (
    Bytes,
    LayerKind,
    LayerProfile,
    ModelProfile,
    WeightProfile,
    always_wrapped,
)
from vitpar.strategy import Strategy, parse
from vitpar.strategy.layout import row_parts

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


def estimate_model(config: ViTConfig, precision: str, hardware: Hardware, tensors: tuple[str, ...]) -> ModelProfile:
    """The profile of `config` in `precision` on a machine with the rates of `hardware`.

    tensors: the tensor-parallel parts of strategies, such as tp4+2d; those that fit the model.
    """
    if hardware.copy_ is None or not hardware.matmuls:
        raise PlannerError(
            f"{hardware.name} has no rates to estimate a model from: profile the model, or use --cluster"
        )
    if PRECISIONS[precision].float8:
        raise PlannerError(f"{hardware.name} has no rates of products in float8: profile the model, or plan for bf16")
    copy, matmul = hardware.copy_, _matmul(hardware, str(PRECISIONS[precision].compute).removeprefix("torch."))
    layers, weights = [], []
    for tensor in tensors:
        strategy = parse(tensor).strategy if tensor != "tp1" else Strategy()
        for kind in LAUNCHES:
            for policy in ("none", "full", "selective"):
                for wrapped in (True,) if always_wrapped(tensor) else (False, True):
                    layers.append(
                        _layer(
                            config, precision, hardware.device, matmul, copy, kind, tensor, strategy, policy, wrapped
                        )
                    )
            elements = layer_elements(config, "blocks.0" if kind == "block" else kind, strategy).computed
            moved = copy.seconds(4 * elements * PRECISIONS[precision].parameters.itemsize)
            timing = Timing(size=elements, seconds=moved, spread=0, samples=1)
            weights.append(WeightProfile(layer=kind, tensor=tensor, elements=elements, gather=timing, reduce=moved))
    sizes = (2**20, 2**30)
    optimizer = [Timing(size=n, seconds=copy.seconds(OPTIMIZER_BYTES * n), spread=0, samples=1) for n in sizes]
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
        optimizer=Curve(timings=tuple(optimizer)),
        microbatch=40 * LAUNCH[hardware.device],
        measured={"estimated": f"by arithmetic, from the rates of {hardware.name}"},
    )


def _layer(
    config: ViTConfig,
    precision: str,
    device: str,
    matmul: Matmul,
    copy: Curve,
    kind: LayerKind,
    tensor: str,
    strategy: Strategy,
    policy: str,
    wrapped: bool,
) -> LayerProfile:
    numbers = PRECISIONS[precision].compute
    counts, plain = _counts(config, kind, strategy, policy), _counts(config, kind, strategy, "none")
    size, start = numbers.itemsize, LAUNCH[device] * LAUNCHES[kind]

    def seconds(rows: int, times: float) -> float:
        products = sum(matmul.seconds(times * rows * flops) for flops in plain.products)
        attention = matmul.seconds(times * rows * plain.attention) / ATTENTION if plain.attention else 0.0
        touched = copy.seconds(times * rows * plain.touched * size)
        return max(products + attention + touched, times * start)

    again = {"none": 0.0, "full": 1.0, "selective": 0.3}[policy]
    forward, backward = [], []
    for rows in ROWS:
        number = rows * row_parts(strategy)
        once = seconds(number, 1)
        forward.append(Timing(size=number, seconds=once, spread=0, samples=1))
        backward.append(Timing(size=number, seconds=seconds(number, 2) + again * once, spread=0, samples=1))
    largest = layer_elements(config, "blocks.0" if kind == "block" else kind, strategy).computed / 3
    return LayerProfile(
        layer=kind,
        tensor=tensor,
        checkpoint=policy,
        wrapped=wrapped,
        forward=Curve(timings=tuple(forward)),
        backward=Curve(timings=tuple(backward)),
        input_share=0.5 if kind != "stem" else 0.0,
        saved=Bytes(fixed=0, per_row=counts.saved * size),
        workspace=Bytes(fixed=largest * size, per_row=counts.workspace * size),
    )


def _matmul(hardware: Hardware, dtype: str) -> Matmul:
    """Its rates for `dtype`, or for the first that it has."""
    return next((m for m in hardware.matmuls if m.dtype == dtype), hardware.matmuls[0])


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
    kept, space = _kept(config, strategy, "none"), _space(config, strategy)
    if policy != "none":
        less = _kept(config, strategy, policy)
        space = max(space, kept + space - less + (d / parts if policy == "selective" else 0))
        kept = less
    touched = 10 * d / parts + (2 * d + 2 * h) / t
    return _Counts(products, 4 * s * s * d / t, s * touched, s * kept, s * space)


def _kept(config: ViTConfig, strategy: Strategy, policy: str) -> float:
    """Elements of a token that a block keeps for backward; its own output is among them, its input is not."""
    return sum(_kept_parts(config.width, config.hidden, strategy, policy))


def _kept_parts(d: int, h: int, strategy: Strategy, policy: str) -> Iterator[float]:
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
