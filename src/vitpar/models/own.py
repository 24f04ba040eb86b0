"""Models of the user: a configuration class and layers in a file of their own, which vitpar runs as any other.

A file may hold::

    @dataclass(frozen=True)
    class Mixer(vitpar.OwnModel):
        width: int = 64
        depth: int = 8

        def build_layer(self, name: str) -> vitpar.Layer: ...

Its layers are described by running each once on the meta device. ``examples/own_model.py`` is complete, and
docs/own-model.md explains it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, ClassVar, Self

from vitpar.errors import ModelError
from vitpar.limits import MAX_BLOCKS
from vitpar.models.config import ModelConfig, check_ranges
from vitpar.models.description import LayerDescription, Part, TensorSpec, block_name
from vitpar.models.families import FAMILIES
from vitpar.models.role_names import role_of
from vitpar.models.text import MODES
from vitpar.own_files import load_class
from vitpar.text import shown

if TYPE_CHECKING:
    from torch import Tensor, nn

    from vitpar.models.layers import Layer


@dataclass(frozen=True)
class OwnModel(ModelConfig):
    """Base of the configurations of models that users write.

    Subclasses are frozen dataclasses whose fields all have defaults. They define `build_layer`.
    """

    FAMILY: ClassVar[str] = "own"

    name: str = "own"
    """Name of the model; messages use it."""
    image_size: int = 224
    """Side of the square input image, in pixels."""
    channels: int = 3
    """Channels of an input image."""
    num_classes: int = 1000
    """Outputs of the classifier."""
    depth: int = 12
    """Number of blocks."""

    def __post_init__(self) -> None:
        check_ranges(self, {})

    @classmethod
    def knows(cls, name: str) -> bool:
        return PurePath(name).name == cls.FAMILY

    @classmethod
    def named(cls, name: str, options: Mapping[str, Any]) -> Self:
        try:
            return cls(**{"name": name, **options})
        except TypeError as error:  # a field without default, or of another type than the class computes with
            raise ModelError(f"{shown(name)} cannot be built: {shown(error)}") from None

    def describe(self) -> tuple[LayerDescription, ...]:
        if self.depth > MAX_BLOCKS:
            raise ModelError(f"{self.name} has {self.depth:,} blocks: use at most {MAX_BLOCKS:,}")
        names = ("embed", *map(block_name, range(self.depth)), "head")
        layers: list[LayerDescription] = []
        kinds: dict[tuple[object, ...], str] = {}
        taken: TensorSpec | None = None
        for name in names:
            layer = _described(self, name, taken, last=name == names[-1])
            key = layer.takes, layer.gives, layer.parts, layer.modes, layer.other_flops
            kind = kinds.setdefault(key, f"block{len(kinds) + 1}") if layer.is_block else name
            layers.append(dataclasses.replace(layer, kind=kind))
            taken = layer.gives
        if len(kinds) == 1:
            layers[1:-1] = [dataclasses.replace(layer, kind="block") for layer in layers[1:-1]]
        return tuple(layers)


def load(text: str) -> str:
    """Run the file of ``FILE.py:NAME`` and register the configuration class NAME in it. Return `text`.

    The family's name has no folder, so that a run can be resumed from another place.

    Raises ModelError if the file cannot be run or has no such class.
    """
    family, name = load_class(text, ModelConfig, "model", ModelError, "OwnModel")
    register(family, name)
    return text


def register(model: type[ModelConfig], name: str | None = None) -> str:
    """Make a configuration class known by `name`, for recipes, weights and checkpoints, and return the name.

    name: None for that of the class.

    Raises ModelError for the name of one of vitpar's families.
    """
    name = name or model.__name__
    if name in FAMILIES and not issubclass(FAMILIES[name], OwnModel):
        raise ModelError(f"there is a family called {name} already: give the model another name")
    model.FAMILY = name
    FAMILIES[name] = model
    return name


def _described(config: OwnModel, name: str, taken: TensorSpec | None, last: bool) -> LayerDescription:
    """Return the description of a layer by running it on the meta device with two samples.

    taken: its input; None for the first layer, which takes the model's (``ModelConfig.input``).
    last: whether it gives logits.

    Raises ModelError for a layer that cannot be built or does not keep the contract.
    """
    import torch

    from vitpar.models.layers import Layer, given_sides, zero_sides

    batch, where = 2, f"layer {name} of {config.name}"
    with torch.device("meta"):
        try:
            layer = config.build_layer(name)
            if not isinstance(layer, Layer):
                raise ModelError(f"{where} is a {type(layer).__name__}: derive its class from vitpar.Layer")
            size = config.input.shape if taken is None else (taken.tokens, taken.features)
            kept = None if taken is not None or config.input.dtype is None else getattr(torch, config.input.dtype)
            x = torch.empty(batch, *size, dtype=kept, requires_grad=kept is None)
            sides = zero_sides(config, batch, "meta")
            y, inputs, flops, saved = _traced(layer, x, given_sides(layer, None, sides))
        except ModelError:
            raise
        except Exception as error:  # of the user's code
            raise ModelError(f"{where} fails: {type(error).__name__}: {shown(error)}") from error
    per_token = last and len(config.output_shape) == 2
    rank = 2 if last and not per_token else 3
    if y.dim() != rank or y.shape[0] != batch:
        wanted = "[batch, classes]" if rank == 2 else "[batch, tokens, features]"
        raise ModelError(f"{where} gives a tensor of shape {list(y.shape)} for {batch} samples: give {wanted}")
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
    gives = TensorSpec(1, y.shape[1]) if rank == 2 else TensorSpec(y.shape[1], y.shape[2])
    parts = tuple(_parts(layer, inputs, batch, where))
    linear = sum(part.flops for part in parts)
    return LayerDescription(
        name,
        "",
        taken,
        gives,
        parts,
        divisible=_divisible(parts),
        modes=tuple(mode for mode in layer.TENSOR_MODES if _computes(parts, mode, last)),
        other_flops=max(0, flops // batch - linear),
        saved=saved // batch,
        last=last,
    )


def _computes(parts: tuple[Part, ...], mode: str, last: bool) -> bool:
    """Return whether a layer with these parts is correct under a tensor-parallel mode."""
    roles = {part.role for part in parts}
    if mode not in MODES and roles & {"vocabulary_embedding", "vocabulary_output"}:
        return False
    # Under sp the head has to gather the samples, since every rank needs all logits of its group.
    return not last or mode == "1d" or bool(roles & {"pooled", "gathered", "vocabulary_output"})


def _traced(
    layer: Layer, x: Tensor, sides: Mapping[str, Tensor]
) -> tuple[Tensor, dict[str, tuple[int, ...]], int, int]:
    """Return (output, shape of the input of each module by name, FLOPs, elements kept for backward)."""
    from torch.autograd.graph import saved_tensors_hooks
    from torch.utils.flop_counter import FlopCounterMode

    inputs: dict[str, tuple[int, ...]] = {}
    own = {p.untyped_storage()._cdata for p in (*layer.parameters(), *layer.buffers())}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            kept[storage._cdata] = storage.nbytes() // tensor.element_size()
        return tensor

    def hook(name: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
        def note(module: nn.Module, arguments: tuple[Tensor, ...], output: Tensor) -> None:
            inputs.setdefault(name, tuple(arguments[0].shape))

        return note

    handles = [module.register_forward_hook(hook(name)) for name, module in layer.named_modules() if name]
    with FlopCounterMode(display=False) as counter, saved_tensors_hooks(keep, lambda tensor: tensor):
        output = layer(x, **sides)
    for handle in handles:
        handle.remove()
    return output, inputs, counter.get_total_flops(), sum(kept.values())


def _parts(layer: Layer, inputs: Mapping[str, tuple[int, ...]], batch: int, where: str) -> Iterator[Part]:
    """Yield the parts of a layer: those with a role, then all other parameters."""
    given = {name: role_of(role, f"{shown(name)} of {where}") for name, role in layer.TENSOR_PARALLEL.items()}
    modules = dict(layer.named_modules())
    left = {name: tuple(p.shape) for name, p in layer.named_parameters()}
    for name, role in given.items():
        if name in left:
            yield Part(name, role, {"": left.pop(name)})
        elif name in modules:
            shapes = {key: tuple(p.shape) for key, p in modules[name].named_parameters(recurse=False)}
            for key in shapes:
                left.pop(f"{name}.{key}", None)
            taken = inputs.get(name)
            if role == "vocabulary_embedding" and taken:
                taken = *taken, shapes["weight"][1]  # as many tokens as ids
            yield Part(name, role, shapes, *_tokens(taken, batch))
        else:
            raise ModelError(f"{where} has no '{shown(name)}', which its TENSOR_PARALLEL names: correct the name")
    owners: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, shape in left.items():
        owner, _, key = name.rpartition(".")
        owners.setdefault(owner, {})[key] = shape
    for owner, shapes in owners.items():
        if owner == "":
            yield from (Part(key, "other", {"": shape}) for key, shape in shapes.items())
        else:
            yield Part(owner, "other", shapes, *_tokens(inputs.get(owner), batch))


def _tokens(shape: tuple[int, ...] | None, batch: int) -> tuple[int, int]:
    """Return (positions of a sample at which a module computes, features of each) for an input of `shape`."""
    return (math.prod(shape[:-1]) // batch, shape[-1]) if shape else (0, 0)


def _divisible(parts: tuple[Part, ...]) -> dict[str, int]:
    """Return the numbers that the degree of tp has to divide, by noun."""
    divisible: dict[str, int] = {}
    for part in parts:
        if part.product and part.role in ("column", "row", "classifier", "merge"):
            taken, given = part.product
            divisible[f"{part.name} feature"] = given if part.role == "column" else taken
        elif part.role in ("per_head", "table"):
            divisible[f"{part.name} head"] = next(iter(part.shapes.values()))[0]
    return divisible
