"""Describe a model's layers by running one of each kind on the meta device, which computes shapes and no numbers.

What a layer takes and gives, its products and what it keeps for backward are seen in the run. What no run shows stands
in the classes of its modules: roles (``Layer.TENSOR_PARALLEL``), and as attributes of a module, where it has them,

- ``attention_shape``: its heads, an `AttentionShape` whose `tokens` the run fills in;
- ``divisible``: the numbers that the degree of tp has to divide, by noun;
- ``stacked``: the rows of the maps that a linear layer stores as one (`Part.stacked`).
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from vitpar.errors import ModelError
from vitpar.models.config import ModelConfig
from vitpar.models.description import AttentionShape, LayerDescription, Part, TensorSpec
from vitpar.models.layers import Layer, given_sides, zero_sides
from vitpar.models.roles import role_of
from vitpar.text import shown

BATCH = 2
"""Samples of a run."""
PLACES = ("pooled", "gathered", "gate")
"""Roles of modules that have no parameters."""


Calls = Mapping[str, list[tuple[torch.Size, torch.Size]]]
"""Shapes of the first input and of the output of each call of a module, by its name in the layer."""


def describe_layer(
    config: ModelConfig, name: str, taken: TensorSpec | None, *, saved: bool = False
) -> LayerDescription:
    """Return the description of a layer, which has the name of the layer as its kind.

    taken: its input; None for the first layer, which takes the model's (``ModelConfig.input``).
    saved: whether to count the elements that are kept for backward, which takes twice as long.

    Raises ModelError for a layer that cannot be built or does not keep the contract.
    """
    where, last = f"layer {name} of {config.name}", name == config.layer_names[-1]
    # Descriptions may be needed first where gradients are off, or on.
    with torch.device("meta"), torch.inference_mode(False), torch.set_grad_enabled(saved):
        try:
            layer = config.build_layer(name)
            if not isinstance(layer, Layer):
                raise ModelError(f"{where} is a {type(layer).__name__}: derive its class from vitpar.Layer")
            output, calls, flops, kept = _run(config, layer, taken)
        except ModelError:
            raise
        except Exception as error:  # of the user's code
            raise ModelError(f"{where} fails: {type(error).__name__}: {shown(error)}") from error
    gives = _given(config, output, where, last=last)
    parts, attention = tuple(_parts(layer, calls, where)), None
    for inside, module in layer.named_modules():
        shape: AttentionShape | None = getattr(module, "attention_shape", None)
        if shape is not None and attention is None:
            attention = replace(shape, tokens=calls[inside][0][0][1] // shape.windows)
    counted = sum(part.flops for part in parts) + (attention.flops if attention else 0)
    return LayerDescription(
        name,
        name,
        taken,
        gives,
        parts,
        attention,
        divisible=_divisible(layer, parts),
        other_flops=max(0, flops // BATCH - counted),
        saved=kept // BATCH if saved else None,
        modes=tuple(mode for mode in layer.TENSOR_MODES if _computes(parts, mode, last)),
        last=last,
    )


def _run(config: ModelConfig, layer: Layer, taken: TensorSpec | None) -> tuple[Tensor, Calls, int, int]:
    """Run a layer on the meta device. Return its output, calls, operations, and the elements kept for backward."""
    calls: dict[str, list[tuple[torch.Size, torch.Size]]] = {}
    own = {p.untyped_storage()._cdata for p in (*layer.parameters(), *layer.buffers())}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            kept[storage._cdata] = storage.nbytes() // tensor.element_size()
        return tensor

    def note(name: str, arguments: tuple[Any, ...], output: Tensor) -> None:
        calls.setdefault(name, []).append((arguments[0].shape, output.shape))

    size = config.input.shape if taken is None else (taken.tokens, taken.features)
    kept_type = None if taken is not None or config.input.dtype is None else getattr(torch, config.input.dtype)
    x = torch.empty(BATCH, *size, dtype=kept_type, requires_grad=kept_type is None and torch.is_grad_enabled())
    sides = given_sides(layer, None, zero_sides(config, BATCH, "meta"))
    with ExitStack() as stack:
        for name, module in layer.named_modules():
            hook = module.register_forward_hook(lambda _, given, output, name=name: note(name, given, output))
            stack.callback(hook.remove)
        counter = stack.enter_context(FlopCounterMode(display=False))
        stack.enter_context(saved_tensors_hooks(keep, lambda tensor: tensor))
        output = layer(x, **sides)
    return output, calls, counter.get_total_flops(), sum(kept.values())


def _given(config: ModelConfig, y: Tensor, where: str, *, last: bool) -> TensorSpec:
    """Return what a layer gives. Raises ModelError if the model or its next layer cannot take it."""
    per_token = last and len(config.output_shape) == 2
    rank = 2 if last and not per_token else 3
    if y.dim() != rank or y.shape[0] != BATCH:
        wanted = "[batch, classes]" if rank == 2 else "[batch, tokens, features]"
        raise ModelError(f"{where} gives a tensor of shape {list(y.shape)} for {BATCH} samples: give {wanted}")
    if last and not per_token and y.shape[1] != config.num_classes:
        raise ModelError(
            f"{where} gives {y.shape[1]} logits, but num_classes is {config.num_classes}: build it for that many"
        )
    if per_token and y.shape[1:] != config.output_shape:
        raise ModelError(
            f"{where} gives logits of shape {list(y.shape[1:])}, but output_shape is {list(config.output_shape)}: make "
            "them equal"
        )
    if y._is_view() or not y.is_contiguous():
        # FSDP2 and pipelines hold on to what a layer gives, and send it.
        raise ModelError(f"{where} gives a view of another tensor: end its forward with .contiguous() or .clone()")
    return TensorSpec(1, y.shape[1]) if rank == 2 else TensorSpec(y.shape[1], y.shape[2])


def _parts(layer: Layer, calls: Calls, where: str) -> Iterator[Part]:
    """Yield the parts of a layer: everything that has a role or parameters, in the order of its modules."""
    roles: dict[str, str] = {}  # a layer's own words come before those of its modules
    for owner, module in layer.named_modules():
        for name, given in getattr(module, "TENSOR_PARALLEL", {}).items():
            full = f"{owner}.{name}" if owner else name
            roles.setdefault(full, role_of(given, f"{shown(full)} of {where}"))
    for owner, module in layer.named_modules():
        own = {name: tuple(parameter.shape) for name, parameter in module.named_parameters(recurse=False)}
        role = roles.pop(owner, None)
        if role is not None or (own and owner):
            apart = {name for name in own if role is None and f"{owner}.{name}" in roles}
            shapes = {name: shape for name, shape in own.items() if name not in apart}
            if shapes or (role and (role in PLACES or not isinstance(module, nn.Identity))):
                yield _part(owner, role or "other", shapes, module, calls)
            own = {name: own[name] for name in apart}
        for name, shape in own.items():
            full = f"{owner}.{name}" if owner else name
            yield Part(full, roles.pop(full, "other"), {"": shape})
    if unknown := next((name for name in roles if not _left_out(layer, name)), None):
        raise ModelError(f"{where} has no '{shown(unknown)}', which its TENSOR_PARALLEL names: correct the name")


def _part(name: str, role: str, shapes: dict[str, tuple[int, ...]], module: nn.Module, calls: Calls) -> Part:
    """Return the description of a module."""
    ids, stacked, shapes_of_calls = role == "vocabulary_embedding", getattr(module, "stacked", ()), calls.get(name)
    if not shapes_of_calls or (isinstance(module, nn.Embedding) and not ids):
        return Part(name, role, shapes, stacked=stacked)
    tokens = sum(math.prod(taken if ids else taken[:-1]) for taken, _ in shapes_of_calls) // BATCH
    width = shapes["weight"][1] if ids else 0 if shapes else shapes_of_calls[0][1][-1]
    return Part(name, role, shapes, tokens, width, stacked)


def _left_out(layer: Layer, name: str) -> bool:
    """Return whether this configuration has no such part: its module has None or a function in its place."""
    owner, _, attribute = name.rpartition(".")
    try:
        return not isinstance(getattr(layer.get_submodule(owner), attribute), nn.Module | Tensor)
    except AttributeError:
        return False


def _divisible(layer: Layer, parts: tuple[Part, ...]) -> dict[str, int]:
    """Return the numbers that the degree of tp has to divide, by noun: those that modules name, and of other parts."""
    divisible: dict[str, int] = {}
    named = [name for name, module in layer.named_modules() if hasattr(module, "divisible")]
    for name in named:
        divisible |= layer.get_submodule(name).divisible  # type: ignore[arg-type]
    for part in parts:
        if any(part.name == name or part.name.startswith(f"{name}." * bool(name)) for name in named):
            continue
        if part.product and part.role in ("column", "row", "classifier", "merge"):
            taken, given = part.product
            divisible[f"{part.name} feature"] = given if part.role == "column" else taken
        elif part.role in ("per_head", "table"):
            divisible[f"{part.name} head"] = next(iter(part.shapes.values()))[0]
    return divisible


def _computes(parts: tuple[Part, ...], mode: str, last: bool) -> bool:
    """Return whether a layer with these parts is correct under a tensor-parallel mode."""
    roles = {part.role for part in parts}
    if mode not in ("1d", "sp") and roles & {"vocabulary_embedding", "vocabulary_output"}:
        return False
    # Under sp the head has to gather the samples, since every rank needs all logits of its group.
    return not last or mode == "1d" or bool(roles & {"pooled", "gathered", "vocabulary_output"})
