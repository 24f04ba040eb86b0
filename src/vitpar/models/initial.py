"""Initial parameters as a function of (seed, parameter name): the same under every plan, on every device.

Each value is drawn whole on the CPU from a generator keyed by seed and name, then cut to the local shard, so neither
the ranks nor the order of creation can change it. Schemes are data: the first pattern that matches the name decides.

A rule maps uniform float64 numbers to values by the inverse distribution function, element by element; the result is
rounded to float32. `Tensor.normal_` draws other numbers with other vector instructions, and may with another torch.
"""

import hashlib
import math
from collections.abc import Callable
from fnmatch import fnmatch

import torch
from torch import Generator, Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from vitpar.former_names import former_parameter
from vitpar.models.config import ViTConfig
from vitpar.models.vit import Layer

Rule = Callable[[Tensor, torch.Size, ViTConfig], Tensor]
"""Uniform numbers in (-1, 1), float64; the parameter's shape; the model -> as many values. May change the numbers."""

CHUNK = 2**22
"""Elements drawn at once: limits the memory of float64 numbers beside large parameters."""


def _constant(value: float) -> Rule:
    return lambda v, shape, c: torch.full_like(v, value)


def _normal(std: float, mean: float = 0.0) -> Rule:
    return lambda v, shape, c: v.erfinv_().mul_(math.sqrt(2) * std).add_(mean)


def _lecun_normal(v: Tensor, shape: torch.Size, c: ViTConfig) -> Tensor:
    """Normal numbers cut at two deviations, with a deviation of 1/sqrt(fan in) after the cut."""
    std = 1 / math.sqrt(shape[1]) / 0.87962566103423978  # the deviation of a standard normal that is cut there
    return _normal(std)(v.mul_(math.erf(2 / math.sqrt(2))), shape, c)


def _xavier_uniform(parts: int = 1) -> Rule:
    """Return Xavier's uniform rule for `parts` matrices stacked in one parameter (queries, keys and values)."""
    return lambda v, shape, c: v.mul_(math.sqrt(6 / (shape[0] // parts + shape[1])))


def _torch_convolution(v: Tensor, shape: torch.Size, c: ViTConfig) -> Tensor:
    """``nn.Conv2d.reset_parameters`` for the patches' weight and bias."""
    return v.div_(math.sqrt(c.channels * c.patch_size**2))


def _layer_scale(v: Tensor, shape: torch.Size, c: ViTConfig) -> Tensor:
    return torch.full_like(v, c.layer_scale or 0.0)


def _perturbed_layer_scale(v: Tensor, shape: torch.Size, c: ViTConfig) -> Tensor:
    return _normal(0.1, mean=1.0)(v, shape, c).mul_(c.layer_scale or 0.0)


# timm's trunc_normal_ cuts at ±2, which is 100 deviations here: it cuts nothing off.
_TIMM_FOR_ALL: tuple[tuple[str, Rule], ...] = (
    ("*norm*.weight", _constant(1.0)),
    ("*norm*.bias", _constant(0.0)),
    ("*.gamma", _layer_scale),
    ("embed.pos_embed", _normal(0.02)),
    ("embed.dist_token", _normal(0.02)),
    ("*_token", _normal(1e-6)),
)

SCHEMES: dict[str, tuple[tuple[str, Rule], ...]] = {
    "jax": (
        *_TIMM_FOR_ALL,
        ("embed.patch_embed.proj.weight", _lecun_normal),
        ("head.representation.weight", _lecun_normal),
        ("head.*.weight", _constant(0.0)),
        ("blocks.*.mlp.*.bias", _normal(1e-6)),
        ("*.bias", _constant(0.0)),
        ("*.weight", _xavier_uniform()),
    ),
    "timm": (
        *_TIMM_FOR_ALL,
        ("embed.patch_embed.proj.*", _torch_convolution),
        ("*.bias", _constant(0.0)),
        ("*.weight", _normal(0.02)),
    ),
    "moco": (
        *_TIMM_FOR_ALL,
        ("embed.patch_embed.proj.*", _torch_convolution),
        ("*.bias", _constant(0.0)),
        ("*.qkv.weight", _xavier_uniform(parts=3)),
        ("*.weight", _xavier_uniform()),
    ),
    # A classifier of zeros stops all other gradients: what compares plans starts where every parameter has one.
    "perturbed": (
        ("*norm*.weight", _normal(0.1, mean=1.0)),
        ("*.gamma", _perturbed_layer_scale),
        ("embed.pos_embed", _normal(0.02)),
        ("*_token", _normal(0.05)),
        ("*.bias", _normal(0.05)),
        ("blocks.*.weight", _xavier_uniform()),
        ("*.weight", _lecun_normal),
    ),
}
"""The rules of each scheme, as timm's ``weight_init`` (docs/models.md); "perturbed" is vitpar's, for tests."""


def initial_value(name: str, shape: torch.Size, seed: int, config: ViTConfig) -> Tensor:
    """Return the whole initial value of parameter `name`, float32 on the CPU."""
    rule = next(rule for pattern, rule in SCHEMES[config.init] if fnmatch(name, pattern))
    # Keyed by the former name: a renamed parameter keeps its initial value.
    digest = hashlib.blake2b(f"{seed}/{former_parameter(name)}".encode(), digest_size=8).digest()
    generator = Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
    value = torch.empty(shape, dtype=torch.float32)
    for part in value.view(-1).split(CHUNK):
        # Multiples of 2^-53 become the odd ones between -1 and 1, exactly: never ±1, where erfinv is infinite.
        v = torch.rand(part.shape, dtype=torch.float64, generator=generator).mul_(2).add_(2**-53 - 1)
        part.copy_(rule(v, shape, config))
    return value


def copy_whole_(parameter: Tensor, whole: Tensor) -> None:
    """Fill a parameter, sharded or not, from its whole value; each rank takes its own part, nothing is sent."""
    whole = whole.to(device=parameter.device, dtype=parameter.dtype)
    if isinstance(parameter, DTensor):
        # src_data_rank=None: every rank holds the whole value already.
        local = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
        parameter.to_local().copy_(local.to_local())
    else:
        parameter.copy_(whole)


@torch.no_grad()
def initialise(model: nn.Module, seed: int, config: ViTConfig) -> None:
    """Fill every parameter and buffer of `model`, a whole model or a stage of it, already on its device."""
    for name, parameter in model.named_parameters():
        copy_whole_(parameter, initial_value(name, parameter.shape, seed, config))
    for module in model.modules():
        if isinstance(module, Layer):
            module.reset_buffers()
