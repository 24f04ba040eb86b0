"""Model profile by arithmetic, for hardware of which only rates are known.

Memory is counted tensor by tensor. Time is a roofline: matrix products run at the rate of large ones, attention at a
share of that rate. Bytes read and written by other operations and at the edges of products move at the memory's rate.
All constants of the estimate are below; `experiments/calibration.py` compares it with published runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

from vitpar.errors import PlannerError, StrategyError
from vitpar.models.bases import LOSS_CHUNK
from vitpar.models.config import ModelConfig
from vitpar.models.description import AttentionShape, LayerDescription
from vitpar.models.families import config_to_json
from vitpar.planner.cost.elements import layer_elements
from vitpar.planner.profile.activations import (
    given,
    kept_elements,
    logits_elements,
    normed,
    of_role,
    outer_parts,
    taken,
    transient_elements,
    usual_elements,
    vitpar_elements,
)
from vitpar.planner.profile.curves import Curve, exact
from vitpar.planner.profile.profiles import (
    Bytes,
    Hardware,
    LayerProfile,
    ModelProfile,
    WeightProfile,
    always_wrapped,
)
from vitpar.strategy import Strategy, parse
from vitpar.strategy.execution import FP8_MIN_FEATURES, multiplies_in_float8, update_bytes
from vitpar.strategy.layout import row_parts
from vitpar.strategy.precisions import PRECISION_TYPES
from vitpar.strategy.validate import unsplittable
from vitpar.text import divisors

LAUNCH = 5e-6
"""Host seconds of an operation of other code, or outside blocks; a layer takes at least what the host needs for it."""
HOST_BACKWARD = 1.3
"""Host seconds of a layer's backward, relative to its forward: phases of small models on an H200."""
BIASED = 0.46
"""Rate of attention whose scores have a bias, relative to attention without: memory-efficient attention against
cuDNN's, of 197 tokens on an H100 (experiments/results/gpu_h100_2026-11-26.md)."""
BLOCK_LAUNCHES, FIRST_LAUNCHES, LAST_LAUNCHES = 24, 8, 10
"""Eager operations of a forward: of a block, and of other layers by name. Backward has twice as many; compiled blocks
have half."""
QUANTISING = {True: 4.75, False: 14.0}
"""Passes over a product's inputs that scale them for fp8, by whether blocks are compiled: by the one measured ratio of
a step in fp8 to one in bf16, 0.98 of H/14 on an H200, and counted in `parallel.float8`."""
SCALING_LOSS = 0.012
"""Share of computing lost to stragglers with every doubling of the nodes. Published weak scaling from 8 to 128 GPUs is
94 to 96 %."""
FLOAT8 = "float8_e4m3fn"
"""Key of the rate of fp8 products in a data sheet."""
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
RECOMPUTED = {"none": 0.0, "full": 1.0, "selective": 0.3}
"""Share of a forward that a checkpointing policy adds to backward."""


class Fitted(NamedTuple):
    """Constants fitted to published runs by experiments/calibration.py."""

    eager: float = 1.87
    """Bytes that eager operations other than products read and write, relative to `usual_elements`."""
    tensor: float = 0.42
    """Share by which tensor parallelism prolongs computing: products of split widths are slower, and ranks wait for
    each other at every exchange."""
    host: float = 1.17e-3
    """Host seconds of a layer's forward in vitpar's steps, measured with compiled blocks. Blocks have those of the
    first and the last layer too, for which the GPU does not wait if blocks take long."""


FITTED = Fitted()
"""Constants of every prediction."""


class _Product(NamedTuple):
    """A matrix product with a weight, for one row, on one rank."""

    flops: float
    """FLOPs of the forward."""
    taken: float
    """Elements of the input."""
    given: float
    """Elements of the output."""
    float8: bool
    """Whether output and gradient of the input are computed in float8."""

    def edges(self, forward: bool) -> float:
        """Return the elements of the larger of what is read and written, in forward or in backward's two products."""
        size = 0.5 if self.float8 else 1.0  # of what is read, relative to what is written
        if forward:
            return max(size * self.taken, self.given)
        return max(size * self.given, self.taken) + max(self.taken, self.given)


def tensors(config: ModelConfig, ranks: int) -> tuple[str, ...]:
    """Return the names of the tensor-parallel parts that fit some blocks, for stages of up to `ranks` ranks, tp1 first.

    2.5d is not among them: each of its squares computes as 2d, and shares that profile.
    """
    names = ["tp1"]
    for degree in divisors(ranks)[1:]:
        for flag in ("", "+sp", "+2d", "+3d"):
            with suppress(StrategyError):
                strategy = parse(f"tp{degree}{flag}").strategy
                _ = strategy.tensor_shape  # refuses degrees that are no square or cube
                able = {layer: not unsplittable(layer, strategy) for layer in config.kinds.values()}
                ends = (fits for layer, fits in able.items() if not layer.is_block)
                if all(ends) and any(fits for layer, fits in able.items() if layer.is_block):
                    names.append(f"tp{degree}{flag}")
    return tuple(names)


def estimate_model(
    config: ModelConfig,
    precision: str,
    hardware: Hardware,
    tensor_parts: tuple[str, ...],
    *,
    compiled: bool = False,
    fp8_min_features: int = FP8_MIN_FEATURES,
    vitpar_blocks: bool = True,
    fitted: Fitted = FITTED,
) -> ModelProfile:
    """Return the estimated profile of `config` in `precision`.

    hardware: rates of matrix products and copies.
    tensor_parts: tensor-parallel parts of strategies, such as tp4+2d, that fit the model.
    compiled: whether blocks are compiled.
    fp8_min_features: smallest linear layers that multiply in float8, as in ``Execution``.
    vitpar_blocks: whether blocks and AdamW are vitpar's, which move fewer bytes than those of other libraries.
    fitted: constants of the calibration.

    Raises PlannerError if the hardware profile lacks these rates.
    """
    rates = {matmul.dtype: matmul for matmul in hardware.matmuls}
    numbers, copy = PRECISION_TYPES[precision], hardware.copy_
    if copy is None or not rates:
        raise PlannerError(
            f"{hardware.name} has no rates to estimate a model with: profile the model, or use --cluster"
        )
    if numbers.float8 and FLOAT8 not in rates:
        raise PlannerError(
            f"{hardware.name} has no rate of float8 matrix products: plan for bf16, or use GPUs that have it"
        )
    layers, weights, size = list[LayerProfile](), list[WeightProfile](), numbers.compute.itemsize
    for tensor in tensor_parts:
        strategy = parse(tensor).strategy
        rows = [number * row_parts(strategy) for number in ROWS]
        for kind, layer in config.kinds.items():
            if unsplittable(layer, strategy):
                continue
            elements = layer_elements(layer, strategy).compute_numel
            smallest = fp8_min_features if numbers.float8 and layer.is_block else math.inf
            seconds = _roofline(config, layer, strategy, hardware, precision, smallest, compiled, vitpar_blocks, fitted)
            forward, backward = ({number: seconds(number, way) for number in rows} for way in (True, False))
            slower = 1 + fitted.tensor * (strategy.degree("tp") > 1)
            for policy, again in RECOMPUTED.items():
                saved, space = _saved_and_workspace(layer, strategy, policy)
                logits = logits_elements(layer, strategy)  # the loss keeps them, and their gradients are transient
                # A weight's gradient is transient until it is accumulated. The largest weight of a block has about a
                # third of its elements. The loss computes exponentials in float32 and in chunks.
                fixed = elements / 3 * size + (4 * LOSS_CHUNK if logits else 0)
                times = (forward.items(), ((number, backward[number] + again * forward[number]) for number in rows))
                curves = [Curve(timings=exact(points)).slower(slower) for points in times]
                for wrapped in (True,) if always_wrapped(tensor) else (False, True):
                    layers.append(
                        LayerProfile(
                            layer=kind,
                            tensor=tensor,
                            checkpoint=policy,
                            wrapped=wrapped,
                            forward=curves[0],
                            backward=curves[1],
                            input_share=0.5 if layer.takes else 0.0,
                            saved=Bytes(fixed=0, per_row=(saved + logits) * size),
                            workspace=Bytes(fixed=fixed, per_row=(space + logits) * size),
                        )
                    )
            moved = copy.seconds(4 * elements * numbers.parameters.itemsize)
            (gather,) = exact([(elements, moved)])
            weights.append(WeightProfile(layer=kind, tensor=tensor, elements=elements, gather=gather, reduce=moved))
    blocks = "blocks compiled" if compiled else "blocks not compiled"
    # As ``vitpar.training.optim.one_pass`` chooses.
    one_pass = vitpar_blocks and hardware.device == "cuda" and precision != "fp64"
    update = update_bytes(precision, one_pass=one_pass)
    profile = ModelProfile(
        model=config_to_json(config),
        device=hardware.device,
        device_name=hardware.device_name,
        precision=precision,
        compiled=compiled,
        fp8_min_features=fp8_min_features,
        processes=1,
        layers=tuple(layers),
        weights=tuple(weights),
        optimizer=Curve(timings=exact((n, copy.seconds(update * n)) for n in (2**20, 2**30))),
        microbatch=40 * LAUNCH,
        measured={"estimated": f"by arithmetic, from the rates of {hardware.name}, {blocks}"},
    )
    return profile.slower(1 + SCALING_LOSS * math.log2(hardware.ranks / hardware.ranks_per_node), 1.0)


def _roofline(
    config: ModelConfig,
    layer: LayerDescription,
    strategy: Strategy,
    hardware: Hardware,
    precision: str,
    smallest: float,
    compiled: bool,
    vitpar_blocks: bool,
    fitted: Fitted,
) -> Callable[[int, bool], float]:
    """Return the function of (rows, whether forward or backward) of a layer's seconds on a rank, without checkpointing.

    smallest: smallest products in float8; infinity for none. Other parameters are those of `estimate_model`.
    """
    rates, compute = {matmul.dtype: matmul for matmul in hardware.matmuls}, PRECISION_TYPES[precision].compute
    matmul, in_float8, copy = rates.get(compute.name, hardware.matmuls[0]), rates.get(FLOAT8), hardware.copy_
    assert copy is not None
    products, attention, attention_rate = tuple(_products(layer, strategy, smallest)), 0.0, hardware.kernels.attention
    if layer.is_block:
        attended = tiled_flops(layer.attention, hardware.kernels.attention_tile) if layer.attention else 0
        attention = (layer.other_flops + attended) / strategy.degree("tp")
        attention_rate *= BIASED if layer.attention and layer.attention.biased else 1.0
    launches = FIRST_LAUNCHES if layer.first else LAST_LAUNCHES if layer.last else BLOCK_LAUNCHES
    # An adapter has two products, a factor and a sum.
    launches += 2 * sum(part.adapts for part in layer.parts)
    operations = launches / (2 if compiled and layer.is_block else 1)
    ours = fitted.host * len(config.layer_names) / len(config.blocks)
    host = ours if vitpar_blocks and layer.is_block else operations * LAUNCH
    if compiled and vitpar_blocks:
        moved = vitpar_elements(config, layer, strategy, smallest)
    else:
        moved = usual_elements(layer, strategy)

    def seconds(rows: int, forward: bool) -> float:
        # Backward has two products (for gradients of inputs and of weights) for one of forward, and twice the rest.
        times, computed = 1 if forward else 2, 0.0
        for product in products:
            used = [in_float8 if product.float8 and in_float8 else matmul] + [matmul] * (not forward)
            computed += sum(rate.seconds(rows * product.flops) for rate in used)
        if attention:
            computed += times * matmul.seconds(rows * attention) / attention_rate
        # At its start a product mostly reads and at its end mostly writes, while few FLOPs are computed. This costs the
        # time to move the larger of input and output, so narrow products are slower.
        touched = moved[0 if forward else 1] * (1.0 if compiled else fitted.eager)
        touched += sum(product.edges(forward) for product in products)
        touched += QUANTISING[compiled] * sum(p.taken if forward else p.given for p in products if p.float8)
        computed += copy.seconds(rows * touched * compute.itemsize)
        return max(computed + times * operations * hardware.kernels.gap, host * (1 if forward else HOST_BACKWARD))

    return seconds


def tiled_flops(shape: AttentionShape, tile: int) -> int:
    """Return the FLOPs of attention in forward, for one sample, with full tiles of `tile` tokens."""
    # Few tokens use a smaller tile: the next power of two, at least 16.
    tile = min(tile, max(16, 1 << (shape.tokens - 1).bit_length()))
    return replace(shape, tokens=-(-shape.tokens // tile) * tile).flops


def _saved_and_workspace(layer: LayerDescription, strategy: Strategy, policy: str) -> tuple[float, float]:
    """Return the elements of a row, without logits, that a rank (keeps for backward, needs besides).

    policy: checkpointing policy.
    """
    outside, gives, norms = outer_parts(strategy), layer.gives.elements, normed(*of_role(layer, "norm"))
    if layer.first:
        pixels = sum(product.taken for product in _products(layer, strategy, math.inf))
        return (gives + norms) / outside + (0 if policy == "full" else pixels), gives / outside
    if layer.last:
        return 2 * norms / outside, (layer.takes or layer.gives).elements / outside
    kept = (
        layer.saved / strategy.degree("tp") if layer.saved is not None else sum(kept_elements(layer, strategy, "none"))
    )
    space = transient_elements(layer, strategy)
    if policy == "none":
        return kept, space
    # Backward recomputes what was not kept: it is alive while the layer computes, as workspace.
    less = sum(kept_elements(layer, strategy, policy))
    return less, max(space, kept + space - less + (gives / outside if policy == "selective" else 0))


def _products(layer: LayerDescription, strategy: Strategy, fp8_min_features: float) -> Iterator[_Product]:
    """Yield the products of a layer on one rank."""
    t, side, parts = strategy.degree("tp"), dict(strategy.tensor_shape)["j"], outer_parts(strategy)
    # A product's input and output are split into `inner` and `outer` parts; the next product swaps them.
    inner, outer = {"2d": (side, side), "3d": (side**2, side**2)}.get(strategy.tensor_mode, (1, t))
    for part in layer.parts:
        if part.product is None:
            continue
        inputs, outputs = taken(part), given(part)
        float8 = multiplies_in_float8(*part.product, fp8_min_features) and not part.adapts
        match part.role:
            case "column":
                yield _Product(part.flops / t, inputs / inner, outputs / outer, float8)
            case "column_b" | "row_a":
                yield _Product(part.flops / t, inputs / t, outputs / t, float8)
            case "row":
                yield _Product(part.flops / t, inputs / outer, outputs / inner, float8)
            case "output":
                yield _Product(part.flops, inputs, outputs, float8)
            case "classifier" | "vocabulary_output":
                yield _Product(part.flops / t, inputs, outputs / t, float8)
            case "merge":
                yield _Product(part.flops / t, inputs / t, outputs / parts, float8)
            case _:
                yield _Product(part.flops / parts, inputs / parts, outputs / parts, float8)
