"""Base of all layers, and a model as an ordered mapping of named layers: embed, blocks.0 …, head.

A layer takes one tensor and gives one. What it takes and gives, and how its parameters split under tensor parallelism,
is in its description (``vitpar.models.description``).
"""

import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ParallelStyle

from vitpar.models.compiled import LinearBySample, kept, trains_compiled
from vitpar.models.config import GATED, ModelConfig
from vitpar.models.description import MODES, LayerDescription, SideInput
from vitpar.models.keyed_random import at_place, drop, keeps_sample
from vitpar.sharded import to_local


class _OwnGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.clone()


def for_every_sample(parameter: Tensor) -> Tensor:
    """Return a parameter [1, tokens, features] to add to or stand beside the tokens of every sample.

    With one sample its gradient would be a part of the activation's, in the same memory, and accumulating into it would
    change both: a DTensor around it hides that from autograd (upstream: AccumulateGrad takes over what it alone holds).
    """
    return _OwnGradient.apply(to_local(parameter))


class Layer(nn.Module):
    """Base of a model's layers."""

    description: LayerDescription
    """Description of the layer, set by the model that holds it."""
    TENSOR_PARALLEL: ClassVar[Mapping[str, str | ParallelStyle]] = {}
    """Roles of modules and parameters by name, or what stands for roles (``vitpar.models.roles``).

    Modules inside a layer can have roles of their own parts, and what else no run shows (``vitpar.models.trace``)."""
    TENSOR_MODES: ClassVar[tuple[str, ...]] = ("1d", "sp")
    """Tensor-parallel modes under which these roles compute the layer correctly. Without roles, every rank computes all
    of the layer under 1d, and its part of the samples under sp."""
    SIDE_INPUTS: ClassVar[tuple[str, ...]] = ()
    """Names of the side inputs that `forward` takes after the activation (``ModelConfig.side_inputs``), and `keys`."""
    distilled_training: bool
    """Whether a training gets the logits of both classifiers side by side, for a last layer with two; timm's name."""
    GROUP_SIDES: ClassVar[tuple[str, ...]] = ()
    """Names of the side inputs that are used between a column and a row layer, such as masks of attention. `forward`
    gets those of all samples of its tensor-parallel group. With +sp the activation has only a part of these."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.SIDE_INPUTS = tuple(inspect.signature(cls.forward).parameters)[2:]

    def take_features(self, index: int, parts: int) -> None:
        """Expect and give only part `index` of `parts` of the tokens' features."""

    def take_heads(self, index: int, parts: int) -> None:
        """Compute only part `index` of `parts` of the heads, which tensor parallelism gives this rank.

        Split parameters have the rows of these heads already. A table has those of all heads (role ``table``).
        """

    def reset_buffers(self) -> None:
        """Fill what is neither learned nor saved."""


class LayerNorm(nn.LayerNorm):
    """LayerNorm whose weight and bias get accurate gradients in 16 bits, on CPUs too.

    upstream: on CPUs, torch's backward of ``layer_norm`` sums the gradients of weight and bias in 16 bits, token after
    token. With 4,096 tokens a bias's gradient is a fifth too small. Products and sums accumulate in float32.
    """

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., features] -> the same shape."""
        if x.device.type != "cpu" or x.dtype not in (torch.bfloat16, torch.float16):
            return super().forward(x)
        return torch.addcmul(self.bias, F.layer_norm(x, self.normalized_shape, eps=self.eps), self.weight)


NORMS: dict[str, type[nn.Module]] = {"layer": LayerNorm, "rms": nn.RMSNorm}
"""Norms by name; each is built from the number of features and ``eps``."""


class Gate(nn.Module):
    """Multiply every second feature by `activation` of the feature before it, which halves their number.

    Gates and values alternate, so that a slice of the features has both.
    """

    def __init__(self, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., 2 · features] -> [..., features]."""
        gate, value = x.unflatten(-1, (-1, 2)).unbind(-1)
        return self.activation(gate) * value


_GELU_TANH = functools.partial(F.gelu, approximate="tanh")
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"gelu": F.gelu, "gelu_tanh": _GELU_TANH, "relu": F.relu}
_GATES: dict[str, Callable[[Tensor], Tensor]] = {"swiglu": F.silu, "geglu": F.gelu, "geglu_tanh": _GELU_TANH}


def activation_of(name: str) -> Callable[[Tensor], Tensor]:
    """Return the function between the two linear layers of an MLP: a `Gate` for those of `GATED`."""
    return Gate(_GATES[name]) if name in GATED else _ACTIVATIONS[name]


class StackedLinear(nn.Linear):
    """Linear layer that stores several maps as one, in groups of rows.

    stacked: rows of each map in a group; () for a single map.
    """

    def __init__(self, width: int, features: int, stacked: tuple[int, ...], *, bias: bool = True) -> None:
        super().__init__(width, features, bias=bias)
        self.stacked = stacked


class BeforeActivation(StackedLinear):
    """Linear layer before an activation.

    Compiled, the gradient of the bias is summed in the kernel of the activation's backward, which needs sums over parts
    of the tokens. Otherwise the compiler sums in a kernel that reads the gradient of all hidden features again: 4 of 52
    passes over tokens x width a block on GPUs (experiments/dry_bench.py).
    """

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, tokens, features] -> [batch, tokens, features]."""
        if x.dim() != 3 or self.bias is None or not trains_compiled():
            return super().forward(x)
        return LinearBySample.apply(x, self.weight, self.bias)


class MLP(nn.Module):
    """Linear, activation, norm if there is one, Linear.

    hidden: features that the second linear layer takes.
    activation: name of `activation_of`. The rows of `fc1` alternate between gates and values if it is a gated one.
    norm: norm of the hidden features.
    bias: whether the linear layers have biases.
    """

    TENSOR_PARALLEL: ClassVar = {"fc1": "column", "activation": "gate", "norm": "inner_norm", "fc2": "row"}

    def __init__(
        self, width: int, hidden: int, activation: str = "gelu", norm: nn.Module | None = None, *, bias: bool = True
    ) -> None:
        super().__init__()
        gates = activation in GATED
        self.fc1 = BeforeActivation(width, hidden * (1 + gates), (1, 1) * gates, bias=bias)
        self.activation = activation_of(activation)
        self.norm = norm or nn.Identity()
        self.fc2 = nn.Linear(hidden, width, bias=bias)
        self.divisible = {"hidden feature": hidden}

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, tokens, width] -> the same shape."""
        return self.fc2(self.hidden(x))

    def hidden(self, x: Tensor) -> Tensor:
        """Return what `fc2` takes: [batch, tokens, hidden]."""
        return self.norm(self.activation(self.fc1(x)))


class ResidualBlock(Layer):
    """Base of blocks with residual branches that are dropped at random in training.

    index: number of the block among `depth` blocks.
    width: features of a token.
    drop_path: stochastic depth rate of the last block; it rises linearly from 0 over the blocks.
    dropout: dropout rate at the end of each branch.
    """

    TENSOR_MODES: ClassVar[tuple[str, ...]] = MODES
    place: Tensor
    rate: Tensor

    def __init__(self, index: int, depth: int, width: int, *, drop_path: float = 0.0, dropout: float = 0.0) -> None:
        super().__init__()
        self.index, self.dropout, self.drops_paths = index, dropout, drop_path > 0
        self.width, self.first_feature = width, 0
        self.drop_path_rate = drop_path * index / max(1, depth - 1)
        # Tensors, since the compiler would make a graph for every value of a number: one graph serves all blocks.
        self.register_buffer("place", torch.empty((), dtype=torch.int64), persistent=False)
        self.register_buffer("rate", torch.empty(()), persistent=False)

    def take_features(self, index: int, parts: int) -> None:
        self.first_feature = index * self.width // parts

    def reset_buffers(self) -> None:
        self.place.fill_(1 + 4 * self.index)  # of its random numbers, two for each branch; embed's is 0
        self.rate.fill_(self.drop_path_rate)

    def set_drop_path(self, share: float) -> None:
        """Drop branches at `share` of the layer's rate from now on."""
        self.rate.fill_(self.drop_path_rate * share)

    def branch(self, x: Tensor, keys: Tensor | None, number: int, scale: nn.Module | None = None) -> Tensor:
        """Return the output `x` of branch `number` (0 or 1) with dropout, `scale` and stochastic depth.

        keys: int64 [batch] or None (nothing is dropped).
        """
        if keys is not None and self.dropout:
            here = at_place(keys, self.place + 2 * number)
            x = drop(x, here, self.dropout, whole_sample=False, first_feature=self.first_feature)
        x = x if scale is None else scale(x)
        if keys is not None and self.drops_paths:
            x = drop(x, self._path_keys(keys, number), self.rate, whole_sample=True)
        return x

    def path_scale(self, keys: Tensor | None, number: int, dtype: torch.dtype) -> Tensor | None:
        """Return the factors of branch `number` by stochastic depth, of `dtype` [batch, 1, 1]; None for 1."""
        if keys is None or not self.drops_paths:
            return None
        keep = keeps_sample(self._path_keys(keys, number), self.rate).to(dtype)
        return kept(torch.div, keep, 1.0 - self.rate).view(-1, 1, 1)

    def _path_keys(self, keys: Tensor, number: int) -> Tensor:
        return at_place(keys, self.place + 2 * number + 1)


def given_sides(
    layer: Layer,
    keys: Tensor | None,
    sides: Mapping[str, Tensor],
    rows: slice = slice(None),
    group_rows: slice = slice(None),
) -> dict[str, Tensor]:
    """Return the side inputs that a layer takes, by name.

    rows: samples of its activation.
    group_rows: samples that its tensor-parallel group computes, for `Layer.GROUP_SIDES`.
    """
    every = sides if keys is None else {"keys": keys, **sides}
    return {
        name: every[name][group_rows if name in layer.GROUP_SIDES else rows]
        for name in layer.SIDE_INPUTS
        if name in every
    }


def zero_sides(config: ModelConfig, rows: int, device: torch.device | str) -> dict[str, Tensor]:
    """Return side inputs of zeros for `rows` samples, with keys if the model takes them, to run layers alone."""
    every = {**({"keys": SideInput(())} if config.stochastic else {}), **config.side_inputs}
    return {
        name: torch.zeros(rows, *side.shape, dtype=getattr(torch, side.dtype), device=device)
        for name, side in every.items()
    }


class LayeredModel(nn.Module):
    """A model, or the consecutive part of one that `layers` names (a pipeline stage).

    A layer it lacks is absent, and the names of the parameters it holds do not change. Parameters and buffers are not
    filled: ``vitpar.models.initial.initialise`` does that.

    config: configuration of the whole model. layers: names as in ``config.layer_names``; None for all.
    """

    def __init__(self, config: ModelConfig, layers: Collection[str] | None = None) -> None:
        super().__init__()
        held = set(config.layer_names if layers is None else layers)
        assert held <= set(config.layer_names), f"unknown layers {held - set(config.layer_names)}"
        self.config = config
        self._layers: dict[str, Layer] = {}
        for name in config.layer_names:
            if name not in held:
                continue
            layer = cast(Layer, config.build_layer(name))
            layer.description, self._layers[name] = config.layers[name], layer
            # A block is a module of the container `blocks`, called by its number.
            container, _, number = name.rpartition(".")
            if not container:
                self.add_module(name, layer)
                continue
            if container not in self._modules:
                self.add_module(container, nn.ModuleDict())
            self.get_submodule(container).add_module(number, layer)

    def tie(self) -> None:
        """Make the copies of shared parameters the same objects as their owners, for a model outside any plan."""
        for copy, owner in self.config.shared.items():
            module, _, name = copy.rpartition(".")
            setattr(self.get_submodule(module), name, self.get_parameter(owner))

    def layers(self) -> dict[str, Layer]:
        """Return the layers held here, by name, in order."""
        return self._layers

    def forward(self, x: Tensor, keys: Tensor | None = None, **sides: Tensor) -> Tensor:
        """Return logits, or tokens where the last layer is elsewhere.

        x: the model's input (``ModelConfig.input``), or tokens where the first layer is elsewhere.
        keys: int64 [batch], each sample's key for drop-path and dropout (``vitpar.models.keyed_random``).
        sides: other side inputs by name, [batch, …].
        """
        for layer in self.layers().values():
            x = layer(x, **given_sides(layer, keys, sides))
        return x


class PlainModel(LayeredModel):
    """All layers of a model on one device, which any training loop of PyTorch can use."""

    def forward(self, x: Tensor, keys: Tensor | None = None, **sides: Tensor) -> Tensor:
        """Return logits, as `LayeredModel.forward` does. In training, random keys are drawn if none are given."""
        if keys is None and self.training and self.config.stochastic:
            keys = torch.randint(2**62, (len(x),), device=x.device)
        return super().forward(x, keys, **sides)
