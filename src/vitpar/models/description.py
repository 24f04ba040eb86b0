"""Description of a model's layers: all that plans, prices and checkpoints need to know about them.

A model is ``embed``, ``blocks.0`` …, ``head``, each of which takes one tensor and gives one (`TensorSpec`). Between
them run activations [batch, tokens, features], whose tokens and features may differ from boundary to boundary. What is
special about a layer is a property of its description (`LayerDescription.first`, `last`, `compiled` …), never its name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from vitpar.errors import ModelError
from vitpar.text import shown

if TYPE_CHECKING:
    from torch import Tensor

Backward = Literal["all", "weights", "inputs", "nothing"]
"""Gradients that a layer's backward computes: of weights and input, or only of one of them."""
_BLOCKS = "blocks."
"""Begin of the names of blocks, followed by their numbers from 0."""
ADAPTERS = (".lora_A", ".lora_B")
"""Ends of the names of an adapter's linear layers, behind that of the layer that they adapt."""
MODES = ("1d", "sp", "2d", "2.5d", "3d")
"""Tensor-parallel modes; 1d with sequence parallelism counts as one of its own."""
MOST_OF_A_TABLE = 2**18
"""Elements of a table at most, 1 MiB in float32: every rank keeps all of it."""


@dataclass(frozen=True)
class TensorSpec:
    """Activation of one sample between two layers. The precision decides its dtype."""

    tokens: int
    """Number of tokens."""
    features: int
    """Number of features of a token."""

    @property
    def elements(self) -> int:
        """Return the number of elements."""
        return self.tokens * self.features


@dataclass(frozen=True)
class InputSpec:
    """Input of the first layer for one sample."""

    shape: tuple[int, ...]
    """Shape: (channels, size, size) for images, (tokens,) for token ids."""
    dtype: str | None = None
    """Name of the data type in torch, such as int64 for token ids; None for that in which the model computes."""

    def bytes(self, itemsize: int) -> int:
        """Return the bytes of a sample. itemsize: bytes of a number in which the model computes."""
        return math.prod(self.shape) * (itemsize if self.dtype is None else _BYTES[self.dtype])


_BYTES = {"bool": 1, "uint8": 1, "int32": 4, "int64": 8}


@dataclass(frozen=True)
class SideInput:
    """Input of a sample besides that of the first layer, which any layer can take: every rank has all samples'."""

    shape: tuple[int, ...]
    """Shape for one sample."""
    dtype: str = "int64"
    """Name of the data type in torch."""
    optional: bool = False
    """Whether it may be left out. The `forward` of a layer that takes it has a default for it."""


@dataclass(frozen=True)
class Part:
    """A module or a parameter of a layer, as tensor parallelism splits it."""

    name: str
    """Name in the layer, such as ``attn.qkv``."""
    role: str
    """Role, which decides how it is split (``vitpar.models.roles``)."""
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict, hash=False)
    """Shapes of the parameters by name in the module; a bare parameter has the name "". The weight of a linear layer is
    (features it gives, features it takes)."""
    tokens: int = 0
    """Tokens of a sample that the module computes; 0 if it computes none."""
    width: int = 0
    """Features of these tokens, for modules without parameters and embeddings of token ids."""
    stacked: tuple[int, ...] = ()
    """Rows of each map in a group of rows, for several linear maps that are stored as one; the weight is such groups,
    one after another. () for a single map."""

    @property
    def parameters(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the parameters by name in the layer."""
        return {f"{self.name}.{name}" if name else self.name: shape for name, shape in self.shapes.items()}

    @property
    def product(self) -> tuple[int, int] | None:
        """Return the features that a linear layer (takes, gives); None for anything else."""
        weight = self.shapes.get("weight", ())
        return (weight[1], weight[0]) if len(weight) == 2 and self.role != "vocabulary_embedding" else None

    @property
    def adapts(self) -> bool:
        """Whether it is one of the two linear layers of an adapter (``vitpar.models.lora``)."""
        return self.name.endswith(ADAPTERS)

    @property
    def flops(self) -> int:
        """Return the floating-point operations of the product in forward, for one sample."""
        return 2 * self.tokens * math.prod(self.product) if self.product else 0


@dataclass(frozen=True)
class AttentionShape:
    """Shape of a layer's attention for one sample."""

    tokens: int
    """Tokens that attend to each other."""
    heads: int
    """Number of heads."""
    head_dim: int
    """Features of a head."""
    windows: int = 1
    """Number of groups of tokens, which do not attend to each other."""
    biased: bool = False
    """Whether numbers are added to the scores, which fewer kernels support."""
    packed: bool = False
    """Whether queries, keys and values are what one linear layer gives, ordered (head, q|k|v, feature)."""

    @property
    def flops(self) -> int:
        """Return the floating-point operations of both products in forward, for one sample."""
        return 4 * self.windows * self.tokens**2 * self.heads * self.head_dim


PassTable = tuple[tuple[bool, float, float], ...]
"""Rows of (whether it applies, additional passes in forward, in backward)."""


ExtraPasses = tuple[PassTable, PassTable]
"""Reads and writes of a compiled block beyond those of common code, in passes over tokens x features: around the
residual stream, and between the product for queries, keys and values, and attention."""


@dataclass(frozen=True)
class LayerDescription:
    """One layer of a model."""

    name: str
    """Name: embed, blocks.0 …, or head."""
    kind: str
    """Name of its kind. Layers of one kind cost the same, so that one profile serves them all."""
    takes: TensorSpec | None
    """Activation that comes in; None for the first layer, which takes the model's input."""
    gives: TensorSpec
    """Activation that goes out. That of the last layer of a classifier is one token with a feature per class."""
    parts: tuple[Part, ...]
    """Modules and parameters."""
    attention: AttentionShape | None = None
    """Attention, None for layers without."""
    group: str | None = None
    """Name by which plans select this block and its neighbours of the same group, such as stage2; None for none."""
    divisible: Mapping[str, int] = field(default_factory=dict, hash=False)
    """Numbers that the degree of tp has to divide under every mode, by noun: {"head": 12}."""
    other_flops: int = 0
    """Floating-point operations in forward, for one sample, of products that are neither in `parts` nor attention."""
    saved: int | None = None
    """Elements of a sample that are kept from forward to backward; None where they follow from `parts`."""
    modes: tuple[str, ...] = MODES
    """Tensor-parallel modes that compute the layer correctly."""
    backward: Backward = "all"
    """Gradients that backward computes in a training with frozen layers. The first layer's input never has one."""
    frozen: frozenset[str] = frozenset()
    """Names in the layer of the parameters that are not trained, where a training has such."""
    last: bool = False
    """Whether the loss takes what the layer gives."""

    @property
    def first(self) -> bool:
        """Whether the layer takes the model's input."""
        return self.takes is None

    @property
    def is_block(self) -> bool:
        """Whether plans select the layer by a number: it is neither first nor last."""
        return not self.first and not self.last

    @property
    def embeds_ids(self) -> bool:
        """Whether the layer embeds token ids."""
        return any(part.role == "vocabulary_embedding" for part in self.parts)

    @property
    def compiled(self) -> bool:
        """Whether the layer is compiled where a training compiles: it is a block, so that many share a graph."""
        return self.is_block

    @property
    def keeps_gathered(self) -> bool:
        """Whether sharded parameters stay gathered from forward to backward, which follows at once."""
        return self.last

    @property
    def parameters(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the parameters by name in the layer."""
        return {name: shape for part in self.parts for name, shape in part.parameters.items()}

    @property
    def numel(self) -> int:
        """Return the number of parameter elements."""
        return sum(map(math.prod, self.parameters.values()))

    def trains(self, part: Part) -> bool:
        """Return whether a part has parameters, any of which is trained."""
        return any(name not in self.frozen for name in part.parameters)

    def multiplies_for_weight(self, part: Part) -> bool:
        """Return whether backward has a product for the gradient of a linear layer's weight."""
        return part.product is not None and f"{part.name}.weight" not in self.frozen

    @property
    def weight_flops(self) -> int:
        """Return the floating-point operations of backward for gradients of weights, for one sample."""
        return sum(part.flops for part in self.parts if self.multiplies_for_weight(part))

    @property
    def flops(self) -> int:
        """Return the floating-point operations of one sample's training step.

        That is three times those of the matrix products in forward: backward has one product for the gradient of the
        input and one for that of the weight, if it is trained.
        """
        attention = self.attention.flops if self.attention else 0
        products = sum(part.flops for part in self.parts)
        if self.backward == "nothing":
            return products + attention + self.other_flops
        return 2 * products + self.weight_flops + 3 * (attention + self.other_flops)


@dataclass(frozen=True)
class MadeTensor:
    """Tensor of one model that is made of tensors of another."""

    names: tuple[str, ...]
    """Names of the other model's tensors."""
    make: Callable[..., Tensor] = lambda tensor: tensor
    """Function from these, in the order of `names`, to the tensor."""


@dataclass(frozen=True)
class Adapted:
    """Weights of another configuration, for a model to begin its training with."""

    config: Any
    """Configuration (``ModelConfig``) that the tensors are of."""
    tensors: Mapping[str, MadeTensor]
    """How parameters are made of the weights', by name; others are the same."""
    change: str
    """The difference, for the user."""
    kept: tuple[str, ...] = ()
    """Parameters that keep their initial values."""


def parameter_holders(
    parts: Mapping[str, tuple[LayerDescription, Part, tuple[int, ...]]], shared: Mapping[str, str], model: str
) -> dict[str, tuple[str, ...]]:
    """Return the names of each shared parameter and each table in the layers, the owner's first, by that name.

    parts: those of the model called `model`, in order (``ModelConfig.places``).
    shared: owners by the names of their copies (``ModelConfig.shared``).

    Raises ModelError for names that do not exist, an owner behind its copy, and copies of another shape or role.
    """

    def words(part: Part, shape: tuple[int, ...]) -> str:
        return f"{'a table' if part.role == 'table' else 'a parameter'} of shape {list(shape)}"

    layers = [*dict.fromkeys(layer.name for layer, _, _ in parts.values())]
    holders: dict[str, list[str]] = {
        name: [name]
        for name, (_, part, _) in parts.items()
        if name in shared.values() or (name not in shared and part.role == "table")
    }
    for copy, owner in shared.items():
        for name in (copy, owner):
            if name not in parts:
                raise ModelError(f"{model} shares '{shown(name)}', which no layer has: correct the name")
        if owner in shared:
            raise ModelError(f"{model} shares {owner}, which is a copy itself: name the owner {shared[owner]}")
        (behind, mine, shape), (before, theirs, whole) = parts[copy], parts[owner]
        if layers.index(before.name) >= layers.index(behind.name):
            raise ModelError(f"{copy} of {model} is a copy of {owner}, which comes later: let the first layer own it")
        if shape != whole or (mine.role == "table") != (theirs.role == "table"):
            raise ModelError(
                f"{copy} of {model} is {words(mine, shape)}, but its owner {owner} is {words(theirs, whole)}: "
                "make them alike"
            )
        holders[owner].append(copy)
    for name in holders:
        _, part, shape = parts[name]
        if part.role == "table" and math.prod(shape) > MOST_OF_A_TABLE:
            raise ModelError(
                f"{name} of {model} has {math.prod(shape):,} elements, and every rank keeps all of a table: give it "
                f"another role, or at most {MOST_OF_A_TABLE:,}"
            )
    return {name: tuple(names) for name, names in holders.items()}


def block_name(index: int) -> str:
    """Return the name of block `index`."""
    return f"{_BLOCKS}{index}"


def is_block(name: str) -> bool:
    """Return whether a layer is a block, by its name."""
    return name.startswith(_BLOCKS)


def block_index(name: str) -> int:
    """Return the number of the block called `name`, such as 3 of blocks.3."""
    return int(name.removeprefix(_BLOCKS))


def layer_of(name: str) -> str:
    """Return the name of the layer that a parameter belongs to, such as blocks.3 of blocks.3.norm1.weight."""
    first, _, rest = name.partition(".")
    return f"{first}.{rest.partition('.')[0]}" if f"{first}." == _BLOCKS else first
