"""Roles of tensor parallelism: how each mode splits the parts of a layer, and what it sends. One table.

A layer's description names its modules and parameters with a role each (`ROLES`), and `TABLE` has a row for every mode
and role. ``vitpar.parallel.tensor`` computes what the table says, ``vitpar.strategy.traffic`` counts it, and
`vitpar plan --modules` shows it.

W is stored [out, in], X is [batch, tokens, features]; S(n) = Shard(n), R = Replicate, P = Partial. The axes are those
of the layer's mesh: j, and in 3d j and k. The axes i and d of 2d, 2.5d and 3d split the batch, so they are
data-parallel axes (``vitpar.parallel.mesh``): ``fully_shard`` gathers the weights over i, and no weight collective is
in the table.

| mode    | linear | X      | W      | before the matmul   | Y      | after the matmul    | X of the next  |
|---------|--------|--------|--------|---------------------|--------|---------------------|----------------|
| 1d      | column | R      | S0     | (backward: sum)     | S2     |                     | S2             |
| 1d      | row    | S2     | S1     |                     | P      | all-reduce          | R              |
| 1d +sp  | column | S0     | S0     | gather batch        | S2     |                     | S2             |
| 1d +sp  | row    | S2     | S1     |                     | P      | reduce-scatter      | S0             |
| 1d      | words  | R      | S0     |                     | P      | all-reduce          | R              |
| 1d +sp  | words  | S0     | S0     | gather batch (ids)  | P      | reduce-scatter      | S0             |
| 2d 2.5d | both   | S2     | S0     | gather features     | S2     |                     | S2             |
| 3d j, k | column | S0, S2 | S0, S1 | gather batch over j | S2, P  | reduce-scatter on k | S2, S0         |
| 3d j, k | row    | S2, S0 | S1, S0 | gather batch over k | P, S2  | reduce-scatter on j | S0, S2         |

- Sequence parallelism (+sp) splits the batch, not the tokens. The traffic is the same, and ViT-B/16 has 197 tokens, a
  prime. (upstream: uneven token shards are broken in SequenceParallel, torchtitan#1306, pytorch#150336.)
- Norms of split features all-reduce their statistics: DTensor's ``layer_norm`` would all-gather the features.
- A parameter that is replicated along an axis whose ranks see different samples or heads has a partial gradient there
  (`TensorRole.sums`), which is summed once per step.
- Words are embeddings of token ids (`vocabulary_embedding`). Their output (`vocabulary_output`) is a column layer whose
  split logits go to the loss, which sends a few numbers per token (``vitpar.parallel.vocabulary``).
- A vocabulary need not divide: DTensors split rows as torch.chunk does, and only the weights know it. Padding would
  have to be removed from losses, counts and checkpoints.
- Tables are in no row: every rank of the world keeps them complete, and their gradients are summed over the world
  (``vitpar.parallel.shared``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

from vitpar.errors import ModelError
from vitpar.models.description import LayerDescription
from vitpar.text import nearest, shown

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle

ROLES = {
    "column": "first of two linear layers, which splits the features that it gives",
    "row": "second of two linear layers, which splits the features that it takes",
    "heads": "what all heads share: norms of the features of one head, a query for all heads",
    "per_head": "parameter or linear layer whose first dimension is heads, or features of heads",
    "inner_norm": "norm of the features that a column layer gives",
    "gate": "product of half of the features that a column layer gives with a function of the other half",
    "merge": "linear layer from tokens to tokens that is no half of a pair, such as Swin's patch merging",
    "norm": "norm of the tokens' features",
    "scale": "factors of the tokens' features",
    "embedding": "linear layer from pixels to tokens",
    "token": "parameter [1, tokens, features]",
    "pooled": "place between pooling and classifier",
    "representation": "linear layer from pooled features to features",
    "classifier": "linear layer to classes, split over the features that it takes, so that classes need not divide",
    "gathered": "place before a linear layer with the role output, as pooled, but for all tokens at once",
    "output": "linear layer to logits of every token, which every rank computes for all samples",
    "vocabulary_embedding": "embedding of token ids, of which every rank has the rows of a part of the ids",
    "vocabulary_output": "last linear layer to logits of every token, of which every rank has a part of the ids",
    "column_a": "first linear layer of an adapter of a column layer, to a few features",
    "column_b": "second linear layer of an adapter of a column layer",
    "row_a": "first linear layer of an adapter of a row layer, to a few features",
    "row_b": "second linear layer of an adapter of a row layer",
    "table": "small parameter [heads, …] that every rank keeps complete, and of which it uses the rows of its heads",
    "other": "anything else, which only 1d and +sp support",
}
"""Roles of modules and parameters, and what each is for."""
WORDS = {"colwise": "column", "rowwise": "row", "sequence_parallel": "norm"}
"""Roles by transformers' words in a `tp_plan`."""
STOCK = {"ColwiseParallel": "column", "RowwiseParallel": "row", "SequenceParallel": "norm"}
"""Roles by the names of torch's styles (``torch.distributed.tensor.parallel``)."""
AXES: dict[str, dict[str, str]] = {
    "1d": {"j": ""},
    "sp": {"j": "batch"},
    "2d": {"j": "features"},
    "2.5d": {"j": "features"},
    "3d": {"j": "batch", "k": "features"},
}
"""Tensor axes of each mode, and what they split of the tokens between layers: the batch, the features, or nothing."""


@dataclass(frozen=True)
class Exchange:
    """Collectives around a matrix product, or those of a norm: all_gather, all_reduce or reduce_scatter."""

    forward: str | None = None
    """Collective of forward."""
    backward: str | None = None
    """Collective of backward that all gradients need."""
    for_input: str | None = None
    """Collective of backward that only the gradient of the input needs."""
    for_weights: str | None = None
    """Collective of backward that only the gradients of weights need."""
    dim: int | None = None
    """Dimension of the input that is gathered."""
    beside: bool = False
    """Whether what only one gradient needs is sent while the product of the other one is computed."""

    @property
    def words(self) -> str:
        """Collectives in forward / in backward, such as `all-gather / all-gather, reduce-scatter`."""
        later = filter(None, (self.backward, self.for_weights, self.for_input))
        return f"{self.forward or '–'} / {', '.join(later) or '–'}".replace("_", "-")


# Before a product. Backward gathers again: the gathered input is not kept for the gradient of the weight.
COPY = Exchange(for_input="all_reduce", beside=True)
SLICE = Exchange(for_input="all_gather")
GATHER_BATCH = Exchange("all_gather", for_input="reduce_scatter", for_weights="all_gather", dim=0, beside=True)
GATHER_FEATURES = replace(GATHER_BATCH, dim=-1)
GATHER_POOLED = Exchange("all_gather", dim=0)
GATHER_TOKENS = Exchange("all_gather", dim=0)
GATHER_IDS = Exchange("all_gather", dim=0)
STATISTICS = Exchange("all_reduce", for_input="all_reduce")
# After a product.
SUM = Exchange("all_reduce")
SCATTER = Exchange("reduce_scatter", backward="all_gather")
SCATTER_WORDS = Exchange("reduce_scatter", for_weights="all_gather")  # ids have no gradient


class Message(NamedTuple):
    """Collectives along one axis."""

    exchange: Exchange
    """The collectives."""
    axis: str
    """Name of the tensor axis."""


@dataclass(frozen=True)
class TensorRole:
    """Row of the table: how one role is split and computed under one mode."""

    style: str = "Replicate"
    """Name of the style that computes it (``vitpar.parallel.tensor``)."""
    weight: Mapping[str, int] = field(default_factory=dict)
    """Dimension of the weight that is split, by mesh axis; replicated on axes left out. Also used for a bare parameter.
    """
    bias: Mapping[str, int] = field(default_factory=dict)
    """Dimension of the bias that is split, by mesh axis; replicated on axes left out."""
    sums: tuple[str, ...] = ()
    """Axes on which gradients of weight and bias are partial, unless the parameter is split on that axis."""
    before: Message | None = None
    """Collectives before the product, or of a norm."""
    after: Message | None = None
    """Collectives after the product."""
    gathered: Message | None = None
    """Collectives between the product and `after`."""
    whole_output: bool = False
    """Whether the features of the output are not split, although those of tokens are."""
    one_by_one: bool = False
    """Whether tokens are computed one after another."""


def _linear_2d(axis: str, sums: tuple[str, ...] = (), *, pooled: bool = False) -> TensorRole:
    before = Message(GATHER_FEATURES, axis)
    return TensorRole("Linear2D", {axis: 0}, {axis: 0}, sums, before, one_by_one=pooled)


def _norm(axis: str, sums: tuple[str, ...] = ()) -> TensorRole:
    return TensorRole("SplitNorm", {axis: 0}, {axis: 0}, sums, Message(STATISTICS, axis))


def _adapters_3d(of: str, batch: str, features: str) -> dict[str, TensorRole]:
    """Return the rows of the adapters of a linear layer, whose input has these axes. of: the role of the layer."""
    # Partial products of few features are gathered over the batch and scattered along the other axis, as the layer's
    # output is. B then has complete features of the samples that the layer gives.
    first = TensorRole(
        "RowLinear",
        {features: 1},
        sums=(batch,),
        after=Message(SCATTER, features),
        gathered=Message(GATHER_POOLED, batch),
        whole_output=True,
    )
    second = TensorRole("ColumnLinear", {batch: 0}, sums=(features,), before=Message(COPY, batch))
    return {f"{of}_a": first, f"{of}_b": second}


def _of_features(axis: str, sums: tuple[str, ...] = ()) -> dict[str, TensorRole]:
    """Return the rows of the roles whose parameters follow the features of the tokens, which `axis` splits."""
    return {
        "norm": _norm(axis, sums),
        "scale": TensorRole("Shard", {axis: 0}, sums=sums),
        "token": TensorRole("Shard", {axis: -1}, sums=sums),
        "embedding": TensorRole("OwnFeatures", {axis: 0}, {axis: 0}, sums),
        "merge": _linear_2d(axis, sums),
        "representation": _linear_2d(axis, sums, pooled=True),
        "classifier": TensorRole("RowLinear", {axis: 1}, sums=sums, after=Message(SUM, axis)),
    }


_FIRST, _PARTIAL = TensorRole("Shard", {"j": 0}, {"j": 0}), TensorRole(sums=("j",))
_OF_WHOLE = TensorRole("RowLinear", {"j": 1}, before=Message(SLICE, "j"), after=Message(SUM, "j"))
_COLUMN, _ROW = (
    TensorRole("ColumnLinear", {"j": 0}, {"j": 0}, before=Message(COPY, "j")),
    TensorRole("RowLinear", {"j": 1}, after=Message(SUM, "j")),
)
_2D = {
    "column": _linear_2d("j"),
    "row": _linear_2d("j"),
    **dict.fromkeys(("column_a", "row_a"), _ROW),
    **dict.fromkeys(("column_b", "row_b"), _COLUMN),
    "heads": _PARTIAL,
    "per_head": _FIRST,
    "inner_norm": _norm("j"),
    **_of_features("j"),
}
TABLE: dict[str, dict[str, TensorRole]] = {
    "1d": {
        "column": _COLUMN,
        "row": _ROW,
        "column_b": _COLUMN,
        "row_a": _ROW,
        "heads": _PARTIAL,
        "per_head": _FIRST,
        "inner_norm": _norm("j"),
        "merge": _OF_WHOLE,
        "classifier": _OF_WHOLE,
        "vocabulary_embedding": TensorRole("VocabularyEmbedding", {"j": 0}, after=Message(SUM, "j")),
        "vocabulary_output": TensorRole("VocabularyOutput", {"j": 0}, {"j": 0}, before=Message(COPY, "j")),
    },
    "sp": {
        "column": TensorRole("ColumnLinear", {"j": 0}, {"j": 0}, before=Message(GATHER_BATCH, "j")),
        "row": TensorRole("RowLinear", {"j": 1}, sums=("j",), after=Message(SCATTER, "j")),
        "column_b": TensorRole("ColumnLinear", {"j": 0}, before=Message(GATHER_BATCH, "j")),
        "row_a": TensorRole("RowLinear", {"j": 1}, after=Message(SCATTER, "j")),
        "per_head": _FIRST,
        "inner_norm": _norm("j"),
        **dict.fromkeys(
            ("heads", "norm", "scale", "token", "embedding", "merge", "column_a", "row_b", "other"), _PARTIAL
        ),
        "pooled": TensorRole("GatherPooled", before=Message(GATHER_POOLED, "j")),
        "gathered": TensorRole("GatherPooled", before=Message(GATHER_TOKENS, "j")),
        "classifier": _OF_WHOLE,
        "vocabulary_embedding": TensorRole(
            "VocabularyEmbedding", {"j": 0}, before=Message(GATHER_IDS, "j"), after=Message(SCATTER_WORDS, "j")
        ),
        "vocabulary_output": TensorRole("VocabularyOutput", {"j": 0}, {"j": 0}, before=Message(GATHER_BATCH, "j")),
    },
    "2d": _2D,
    "2.5d": _2D,
    "3d": {
        "column": TensorRole(
            "Linear3D", {"j": 0, "k": 1}, {"j": 0}, ("k",), Message(GATHER_BATCH, "j"), Message(SCATTER, "k")
        ),
        "row": TensorRole(
            "Linear3D", {"j": 1, "k": 0}, {"k": 0}, ("j",), Message(GATHER_BATCH, "k"), Message(SCATTER, "j")
        ),
        **_adapters_3d("column", "j", "k"),
        **_adapters_3d("row", "k", "j"),
        "heads": TensorRole(sums=("j", "k")),
        "per_head": TensorRole("Shard", {"j": 0}, {"j": 0}, ("k",)),
        "inner_norm": _norm("j", ("k",)),
        **_of_features("k", ("j",)),
    },
}
"""Rows by mode and role. Roles that a mode leaves out are replicated, compute as without tensor parallelism, and have
complete gradients on every rank."""
UNSPLIT = TensorRole()
"""Row of the roles that a mode leaves out."""


def chunk_range(length: int, parts: int, index: int) -> range:
    """Return the indices in chunk `index` of `parts`, as torch.chunk splits: full ones first, the last may be empty."""
    full = -(-length // parts)
    return range(min(length, index * full), min(length, (index + 1) * full))


@dataclass(frozen=True)
class ParameterSplit:
    """Split of one parameter."""

    shape: tuple[int, ...]
    """Shape of the complete parameter."""
    axes: Mapping[str, int]
    """Dimension that is split, by mesh axis."""
    sums: tuple[str, ...]
    """Axes on which its gradient is partial."""
    complete: bool = False
    """Whether every rank keeps all of it, whatever shards the layer: a table."""
    trained: bool = True
    """Whether it has a gradient."""


def parameter_splits(layer: LayerDescription, mode: str) -> dict[str, ParameterSplit]:
    """Return the splits of a layer's parameters under a tensor-parallel mode, by the parameter's name."""
    splits = {}
    for part in layer.parts:
        role = TABLE[mode].get(part.role, UNSPLIT)
        for name, shape in part.shapes.items():
            axes = role.bias if name == "bias" else role.weight
            axes = {axis: dim % len(shape) for axis, dim in axes.items()}
            sums = tuple(axis for axis in role.sums if axis not in axes)
            key = f"{part.name}.{name}" if name else part.name
            trained = key not in layer.frozen
            splits[key] = ParameterSplit(shape, axes, sums, complete=part.role == "table", trained=trained)
    return splits


def role_of(given: str | ParallelStyle, where: str) -> str:
    """Return the role that a name or stock style stands for.

    A style is read as a name and never applied, so that plans with it are priced and checked as any other.

    where: module that it is given for, for messages.

    Raises ModelError for a style with other options than its defaults, and for anything without a role.
    """
    if isinstance(given, str):
        if (role := WORDS.get(given, given)) in ROLES:
            return role
        raise ModelError(
            f"{where} has the role '{shown(given)}'{nearest(given, [*ROLES, *WORDS])}: use one of "
            f"{', '.join([*ROLES, *WORDS])}"
        )
    name = type(given).__name__
    if name not in STOCK or type(given).__module__.partition(".")[0] != "torch":
        raise ModelError(
            f"{where} has the style {shown(name)}: use {', '.join(f'{stock}()' for stock in STOCK)} or a role"
        )
    usual = vars(type(given)())
    if changed := [key for key, value in vars(given).items() if value != usual.get(key)]:
        raise ModelError(
            f"{where} has {name} with other {', '.join(changed)} than by default: leave them out, since vitpar chooses "
            "layouts by the plan"
        )
    return STOCK[name]
