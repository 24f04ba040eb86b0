"""Initial parameters as a function of (seed, parameter name): the same under every plan, on every device.

Each value is drawn whole on the CPU in float32 from a generator of its own, then cut to the local shard, so neither the
ranks nor the order of creation can change it. Rules are data: the first pattern that matches the name decides.
"""

import hashlib
import math
from collections.abc import Callable
from fnmatch import fnmatch

import torch
from torch import Generator, Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from vitpar.models.config import ViTConfig

Rule = Callable[[Tensor, Generator, ViTConfig], Tensor]


def _trunc_normal(std: float) -> Rule:
    return lambda t, g, c: nn.init.trunc_normal_(t, std=std, a=-2 * std, b=2 * std, generator=g)


def _lecun_normal(t: Tensor, g: Generator, c: ViTConfig) -> Tensor:
    std = 1.0 / math.sqrt(t.shape[1])
    return nn.init.trunc_normal_(t, std=std, a=-2 * std, b=2 * std, generator=g)


def _xavier_uniform(parts: int = 1) -> Rule:
    """As for `parts` matrices of their own that stand in one (queries, keys and values)."""
    return lambda t, g, c: nn.init.uniform_(
        t, *_symmetric(math.sqrt(6 / (t.shape[0] // parts + t.shape[1]))), generator=g
    )


def _symmetric(bound: float) -> tuple[float, float]:
    return -bound, bound


# As the original ViT (arXiv 2010.11929), but for the classifier, which starts small instead of at zero.
RULES: tuple[tuple[str, Rule], ...] = (
    ("*norm*.weight", lambda t, g, c: t.fill_(1.0)),
    ("*.bias", lambda t, g, c: t.zero_()),
    ("*.gamma?", lambda t, g, c: t.fill_(c.layer_scale or 0.0)),
    ("*_token", lambda t, g, c: t.normal_(std=0.02, generator=g)),
    ("stem.pos_embed", _trunc_normal(0.02)),
    ("stem.proj.weight", _lecun_normal),
    ("blocks.*.attn.qkv.weight", _xavier_uniform(parts=3)),
    ("blocks.*.weight", _xavier_uniform()),
    ("head.representation.weight", _lecun_normal),
    ("head.*.weight", _trunc_normal(0.02)),
)


def initial_value(name: str, shape: torch.Size, seed: int, config: ViTConfig) -> Tensor:
    """The whole initial value of parameter `name`, float32 on the CPU."""
    rule = next(rule for pattern, rule in RULES if fnmatch(name, pattern))
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    generator = Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
    return rule(torch.empty(shape, dtype=torch.float32), generator, config)


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
        if hasattr(module, "reset_buffers"):
            module.reset_buffers()
