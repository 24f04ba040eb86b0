"""Base of the configurations of models.

A family is a folder with a configuration class (config), and its layers with the rules of their initial values
(layers).
"""

from __future__ import annotations

import dataclasses
import importlib
import math
from collections.abc import Callable, Collection, Mapping
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, Self

from vitpar.errors import ModelError
from vitpar.models.description import (
    Adapted,
    ExtraPasses,
    InputSpec,
    LayerDescription,
    MadeTensor,
    Part,
    SideInput,
    block_index,
    block_name,
    is_block,
    layer_of,
    parameter_holders,
)
from vitpar.text import short_repr

if TYPE_CHECKING:
    from torch import Tensor, nn


Rule = Callable[..., "Tensor"]
"""Uniform numbers in (-1, 1), float64; the parameter's shape; the model -> as many values. May change the numbers.

They are a run of the parameter's flat elements. A rule with a true attribute `by_place` also takes the first one's
index."""
Rules = tuple[tuple[str, Rule], ...]
"""Pairs of a pattern of parameter names and a rule; the first that matches decides."""

GATED = ("swiglu", "geglu", "geglu_tanh")
"""Activations that multiply half of the features by a function of the other half (arXiv 2002.05202)."""
IGNORED = -1
"""Label of a sample that counts for nothing: padding, or an image that could not be read."""


class ModelConfig:
    """Architecture of a model: all that decides its parameters and its forward function.

    Subclasses are frozen dataclasses with at least the fields below. They raise ModelError for values out of range, or
    that contradict each other.
    """

    FAMILY: ClassVar[str]
    """Name of the family."""
    TASK: ClassVar[str] = "classify"
    """Name of the task that the recipe of imported weights has."""
    CALIBRATED: ClassVar[bool] = False
    """Whether estimated speeds of the family were compared with runs of vitpar, which narrows their error band."""
    NEEDED: ClassVar[tuple[str, ...]] = ()
    """Options that a model needs whose name stands for no fields, such as ``vit_custom``."""
    PUBLISHED: ClassVar[tuple[str, ...]] = ()
    """Names that stand for a published model."""

    name: str
    """Name of the model; only messages use it."""
    image_size: int
    """Side of the square input image, in pixels."""
    channels: int
    """Channels of an input image."""
    num_classes: int
    """Outputs of the classifier."""

    def __repr__(self) -> str:
        return short_repr(self)

    @classmethod
    def fields_of(cls, name: str) -> Mapping[str, Any] | None:
        """Return the fields that a name stands for; None for one that no model of the family has."""
        return None

    @classmethod
    def knows(cls, name: str) -> bool:
        """Return whether `name` is that of a model of this family."""
        return name == f"{cls.FAMILY}_custom" or cls.fields_of(name) is not None

    @classmethod
    def completed(cls, known: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of a model by those that its name stands for, if any, and the user's options."""
        return {**known, **options}

    @classmethod
    def named(cls, name: str, options: Mapping[str, Any]) -> Self:
        """Return the model called `name` with `options` replacing its fields. Raises ModelError if they do not fit."""
        known = cls.fields_of(name)
        if known is None and (missing := {*cls.NEEDED} - options.keys()):
            raise ModelError(f"{name} needs the model option{'s' * (len(missing) > 1)} {', '.join(sorted(missing))}")
        return cls(**{"name": name, **cls.completed(known or {}, options)})

    def kind_of(self, name: str) -> tuple[str, str | None]:
        """Return the kind of a layer and the group of a block, by the layer's name (`LayerDescription`)."""
        return ("block" if is_block(name) else name), None

    def describe(self) -> tuple[LayerDescription, ...]:
        """Return the layers in order: embed, blocks.0 …, head. Each kind is run once, for all equal configurations."""
        return _traced(self)

    def build_layer(self, name: str) -> nn.Module:
        """Return the layer called `name`, a ``vitpar.models.layers.Layer`` with parameters that are not filled."""
        layers = late_module(f"vitpar.models.{self.FAMILY}.layers")
        if is_block(name):
            block: nn.Module = layers.build_block(self, block_index(name))
            return block
        end: nn.Module = (layers.Embed if name == "embed" else layers.Head)(self)
        return end

    def initial_rules(self) -> Rules:
        """Return the rules of the parameters' initial values."""
        rules: Rules = late_module(f"vitpar.models.{self.FAMILY}.layers").SCHEMES[self.init]  # type: ignore[attr-defined]
        return rules

    def extra_passes(self, plain: Collection[str], whole: bool) -> ExtraPasses | None:
        """Return the extra passes of a compiled block, for estimates; None if the family's were not counted.

        plain: names of the block's linear layers with torch's own forward.
        whole: whether a rank has all heads.
        """
        return None

    @property
    def input(self) -> InputSpec:
        """Return the shape and data type of what the first layer takes of a sample."""
        return InputSpec((self.channels, self.image_size, self.image_size))

    @property
    def output_shape(self) -> tuple[int, ...]:
        """Return the shape of the logits of a sample: (classes,), or (tokens, vocabulary) for a model of text."""
        return (self.num_classes,)

    @property
    def sample(self) -> str:
        """Word for what the model takes: `image` or `sequence`."""
        return "image" if self.input.dtype is None else "sequence"

    @property
    def words(self) -> tuple[str, str]:
        """Return what the model takes and gives, for messages: `images of 224 pixels`, `1,000 classes`."""
        if self.input.dtype is not None:
            return f"text of {self.input.shape[0]:,} tokens", f"a vocabulary of {self.num_classes:,}"
        one, several = ("class", "classes") if self.TASK == "classify" else ("output", "outputs")
        noun = one if self.num_classes == 1 else several
        return f"images of {self.image_size} pixels", f"{self.num_classes:,} {noun}"

    @property
    def side_inputs(self) -> Mapping[str, SideInput]:
        """Return the inputs besides `input` by name, such as masks. A layer whose `forward` has the name gets it.

        The samples' random keys, ``keys``, are there for every model that is `stochastic`, and not named here.
        """
        return {}

    @property
    def shared(self) -> Mapping[str, str]:
        """Return the owner of each parameter that several layers share, by the name of a copy.

        Both are names in the model, such as ``{"head.weight": "embed.weight"}``. The owner is in an earlier layer than
        its copies. Each layer has a tensor of its own under a plan. They start with the owner's initial value, get the
        sum of all their gradients, and are saved once, as the owner. Layers that share anything but tables (a role of
        ``vitpar.models.roles``) need the same strategy.
        """
        return {}

    @property
    def pretrained(self) -> tuple[ModelConfig, Mapping[str, MadeTensor]] | None:
        """Return the model that this one is pretraining for, and its parameters without classifier; or None."""
        return None

    def adapted(self, there: ModelConfig) -> Adapted | None:
        """Return weights of the configuration `there` for this model to begin with; None if they need no adapting."""
        return None

    def resized(self, image_size: int) -> Self | None:
        """Return the configuration whose layers take images of another size with the same parameters.

        The layers must take both sizes. None if they take one only, as by default. Raises ModelError for a size that
        the model cannot have.
        """
        return None

    @property
    def unadapted(self) -> ModelConfig:
        """Return the model without adapters: this one, or that which adapters were added to."""
        return self

    @property
    def stochastic(self) -> bool:
        """Return whether training draws random numbers inside the model."""
        return getattr(self, "drop_path", 0.0) > 0 or getattr(self, "dropout", 0.0) > 0

    @property
    def large(self) -> bool:
        """Return whether the model is larger than ViT-B, for which some default settings differ."""
        return self.parameters > 10**8

    @property
    def perturbed(self) -> Self:
        """Return the model with initial values under which no gradient is zero, for comparing plans."""
        return dataclasses.replace(self, init="perturbed") if "init" in field_names(type(self)) else self  # type: ignore[type-var]

    @property
    def tiny(self) -> Self:
        """Return a model with the same layers but less work where that is possible, for warming up."""
        return self

    @property
    def hidden_matrices(self) -> dict[str, tuple[int, ...]]:
        """Return the matrices that blocks multiply by, with the rows of their maps (`Part.stacked`), for Muon.

        A copy of a shared parameter is one if its owner is.
        """
        own = {
            name: part.stacked if name == f"{layer.name}.{part.name}.weight" else ()
            for name, (layer, part, shape) in self.places.items()
            if layer.is_block and len(shape) == 2 and part.role != "table"
        }
        copies = {copy: own[owner] for copy, owner in self.shared.items() if owner in own}
        return {name: rows for name, rows in own.items() if name not in self.shared} | copies

    @cached_property
    def layers(self) -> dict[str, LayerDescription]:
        """Return the layers by name, in order."""
        return {layer.name: layer for layer in self.describe()}

    @cached_property
    def holders(self) -> dict[str, tuple[str, ...]]:
        """Return the names of each shared parameter and table by its owner. Raises ModelError for a wrong `shared`."""
        return parameter_holders(self.places, self.shared, self.name)

    @cached_property
    def places(self) -> dict[str, tuple[LayerDescription, Part, tuple[int, ...]]]:
        """Return the layer, the part and the shape of every parameter by name, also of copies."""
        return {
            f"{layer.name}.{name}": (layer, part, shape)
            for layer in self.layers.values()
            for part in layer.parts
            for name, shape in part.parameters.items()
        }

    @cached_property
    def tables(self) -> frozenset[str]:
        """Return the names of the parameters with the role table."""
        return frozenset(name for name, (_, part, _) in self.places.items() if part.role == "table")

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every parameter by name; of shared ones, the owner's."""
        return {name: shape for name, (_, _, shape) in self.places.items() if name not in self.shared}

    def shape(self, parameter: str) -> tuple[int, ...]:
        """Return the shape of a parameter by its name."""
        return self.shapes[self.owner(parameter)]

    def owner(self, parameter: str) -> str:
        """Return the name of the parameter that `parameter` is a copy of, or `parameter` if it is none."""
        return self.shared.get(parameter, parameter)

    @property
    def num_blocks(self) -> int:
        """Return the number of blocks."""
        depth: int = self.depth  # type: ignore[attr-defined]
        return depth

    @property
    def layer_names(self) -> tuple[str, ...]:
        """Return the names of the layers in order: embed, blocks.0 …, head."""
        return "embed", *map(block_name, range(self.num_blocks)), "head"

    @property
    def first_layer(self) -> LayerDescription:
        """Return the layer that takes the model's input."""
        return self.layers[self.layer_names[0]]

    @property
    def last_layer(self) -> LayerDescription:
        """Return the layer whose output the loss takes."""
        return self.layers[self.layer_names[-1]]

    @property
    def classifiers(self) -> tuple[str, ...]:
        """Return the names of the modules of the last layer that compute classes; empty if it does not say which."""
        return tuple(part.name for part in self.last_layer.parts if part.role == "classifier" and part.product)

    @property
    def blocks(self) -> tuple[str, ...]:
        """Return the names of the blocks in order: layers other than the first and the last."""
        return self.layer_names[1:-1]

    def layers_above(self, parameter: str) -> int:
        """Return the number of layers between a parameter and the output, for layer-wise learning rates.

        parameter: its name. The norm before the classifier, ``head.norm``, counts as a part of the last block, as in
            timm.
        """
        layer = layer_of(self.owner(parameter))
        if parameter.startswith("head.norm."):
            layer = self.layer_names[-2]
        return len(self.layers) - 1 - self.layer_names.index(layer)

    def rate_part(self, parameter: str) -> str:
        """Return the part of the model whose learning rate a task may change, by the name of a parameter."""
        return ""

    def clip_part(self, parameter: str) -> str:
        """Return the part of the model whose gradients ``train.clip_by_part`` clips, by a parameter's name."""
        return ""

    @cached_property
    def kinds(self) -> dict[str, LayerDescription]:
        """Return the first layer of each kind by the kind's name, in order."""
        first_layers: dict[str, LayerDescription] = {}
        for layer in self.layers.values():
            first_layers.setdefault(layer.kind, layer)
        return first_layers

    @property
    def block_kinds(self) -> tuple[LayerDescription, ...]:
        """Return the first layer of each kind of blocks."""
        return tuple(layer for layer in self.kinds.values() if layer.is_block)

    @property
    def groups(self) -> dict[str, range]:
        """Return the blocks that each group of blocks has, by the group's name; empty for a model without groups."""
        spans: dict[str, range] = {}
        for index, block in enumerate(self.blocks):
            if (layer := self.layers[block]).group is not None:
                spans[layer.group] = range(spans.get(layer.group, range(index, index)).start, index + 1)
        return spans

    @cached_property
    def layer_flops(self) -> dict[str, int]:
        """Return the floating-point operations of one image's training step by layer, matrix products only."""
        return {name: layer.flops for name, layer in self.layers.items()}

    @cached_property
    def flops(self) -> int:
        """Return the floating-point operations of one image's training step."""
        return sum(self.layer_flops.values())

    @cached_property
    def parameters(self) -> int:
        """Return the number of parameter elements. Shared ones count once."""
        copies = sum((len(names) - 1) * math.prod(self.shape(owner)) for owner, names in self.holders.items())
        return sum(layer.numel for layer in self.layers.values()) - copies


@lru_cache(maxsize=256)
def _traced(config: ModelConfig) -> tuple[LayerDescription, ...]:
    """Return the result of `ModelConfig.describe`."""
    describe_layer = late_module("vitpar.models.trace").describe_layer
    layers: list[LayerDescription] = []
    known: dict[str, LayerDescription] = {}
    for name in config.layer_names:
        kind, group = config.kind_of(name)
        if kind not in known:
            layer = describe_layer(config, name, layers[-1].gives if layers else None)
            known[kind] = dataclasses.replace(layer, kind=kind, group=group)
        layers.append(dataclasses.replace(known[kind], name=name))
    return tuple(layers)


def late_module(name: str) -> Any:
    """Return a module that imports torch and this one, which configurations do without until a layer is needed."""
    return importlib.import_module(name)


def field_names(config: type[ModelConfig]) -> frozenset[str]:
    """Return the names of a configuration's fields."""
    return frozenset(field.name for field in dataclasses.fields(config))  # type: ignore[arg-type]
