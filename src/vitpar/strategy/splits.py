"""Splits of parameters under tensor parallelism: one table, by mode and role, without torch.

A layer's description names its modules and parameters with a role each. The table says, for every mode and role, which
dimensions of weight and bias are split over which axes. ``vitpar.parallel.tensor`` has the forward of each role, and
``vitpar.strategy.traffic`` what it sends.

| role           | parts of a layer                                                                              |
|----------------|-----------------------------------------------------------------------------------------------|
| column, row    | linear layers in pairs: the first splits the features that it gives, the second those it takes |
| heads          | what all heads share: norms of the features of one head, a query for all heads                |
| per_head       | parameters and linear layers whose first dimension is heads, or features of heads             |
| inner_norm     | norm of the features that a column layer gives                                                |
| gate           | product of half of the features that a column layer gives with a function of the other half  |
| merge          | linear layer from tokens to tokens that is no half of a pair, such as Swin's patch merging    |
| norm, scale    | norms and factors of the tokens' features                                                     |
| embedding      | linear layer from pixels to tokens                                                            |
| token          | parameters [1, tokens, features]                                                              |
| pooled         | place between pooling and classifier                                                          |
| representation | linear layer from pooled features to features                                                 |
| other          | anything else, which only 1d and +sp support                                                  |
| classifier     | linear layer to classes, split over the features that it takes, so that classes need not divide |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from vitpar.models.description import LayerDescription
from vitpar.strategy.layer import Strategy


@dataclass(frozen=True)
class Split:
    """Split of one role under one mode."""

    weight: Mapping[str, int] = field(default_factory=dict)
    """Dimension of the weight that is split, by mesh axis; replicated on axes left out. Also used for a bare parameter.
    """
    bias: Mapping[str, int] = field(default_factory=dict)
    """Dimension of the bias that is split, by mesh axis; replicated on axes left out."""
    sums: tuple[str, ...] = ()
    """Axes on which gradients of weight and bias are partial, unless the parameter is split on that axis."""


def _of_features(axis: str, sums: tuple[str, ...] = ()) -> dict[str, Split]:
    """Return the splits of the roles whose parameters follow the features of the tokens, which `axis` splits."""
    both = Split({axis: 0}, {axis: 0}, sums)
    return {
        "norm": both,
        "scale": Split({axis: 0}, sums=sums),
        "token": Split({axis: -1}, sums=sums),
        "embedding": both,
        "merge": both,
        "representation": both,
        "classifier": Split({axis: 1}, sums=sums),
    }


_PARTIAL = Split(sums=("j",))
_COLUMN, _ROW, _FIRST = Split({"j": 0}, {"j": 0}), Split({"j": 1}), Split({"j": 0}, {"j": 0})
SPLITS: dict[str, dict[str, Split]] = {
    "1d": {
        "column": _COLUMN,
        "row": _ROW,
        "heads": _PARTIAL,
        "per_head": _FIRST,
        "inner_norm": _FIRST,
        "merge": Split({"j": 1}),
        "classifier": Split({"j": 1}),
    },
    "sp": {
        "column": _COLUMN,
        "row": Split({"j": 1}, sums=("j",)),
        "per_head": _FIRST,
        "inner_norm": _FIRST,
        **dict.fromkeys(("heads", "norm", "scale", "token", "embedding", "merge", "other"), _PARTIAL),
        "classifier": Split({"j": 1}),
    },
    "2d": {
        "column": _COLUMN,
        "row": _COLUMN,
        "heads": _PARTIAL,
        "per_head": _FIRST,
        "inner_norm": _FIRST,
        **_of_features("j"),
    },
    "3d": {
        "column": Split({"j": 0, "k": 1}, {"j": 0}, sums=("k",)),
        "row": Split({"j": 1, "k": 0}, {"k": 0}, sums=("j",)),
        "heads": Split(sums=("j", "k")),
        "per_head": Split({"j": 0}, {"j": 0}, sums=("k",)),
        "inner_norm": Split({"j": 0}, {"j": 0}, sums=("k",)),
        **_of_features("k", ("j",)),
    },
}
SPLITS["2.5d"] = SPLITS["2d"]
"""Splits by mode and role. Roles that a mode leaves out stay replicated, with complete gradients on every rank."""


def splits_of(strategy: Strategy) -> dict[str, Split]:
    """Return the splits of a layer under `strategy`, by role."""
    return SPLITS[mode_of(strategy)]


def mode_of(strategy: Strategy) -> str:
    """Return the tensor-parallel mode, with +sp as one of its own."""
    return "sp" if strategy.sequence_parallel else strategy.tensor_mode


def feature_axis(strategy: Strategy) -> str | None:
    """Return the axis that splits the features of the tokens between layers; None if they are replicated."""
    return {"1d": None, "2d": "j", "2.5d": "j", "3d": "k"}[strategy.tensor_mode]


@dataclass(frozen=True)
class ParameterSplit:
    """Split of one parameter."""

    shape: tuple[int, ...]
    """Shape of the complete parameter."""
    axes: Mapping[str, int]
    """Dimension that is split, by mesh axis."""
    sums: tuple[str, ...]
    """Axes on which its gradient is partial."""


def parameter_splits(layer: LayerDescription, strategy: Strategy) -> dict[str, ParameterSplit]:
    """Return the splits of a layer's parameters under `strategy`, by the parameter's name."""
    found, splits = {}, splits_of(strategy)
    for part in layer.parts:
        split = splits.get(part.role, Split())
        for name, shape in part.shapes.items():
            axes = split.bias if name == "bias" else split.weight
            axes = {axis: dim % len(shape) for axis, dim in axes.items()}
            sums = tuple(axis for axis in split.sums if axis not in axes)
            found[f"{part.name}.{name}" if name else part.name] = ParameterSplit(shape, axes, sums)
    return found
