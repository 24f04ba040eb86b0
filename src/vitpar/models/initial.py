"""Initial parameters as a function of (seed, parameter name): the same under every plan, on every device.

Each value is drawn whole on the CPU from a generator keyed by seed and name (`seeding_name`), then cut to the local
shard, so neither the ranks nor the order of creation can change it. Rules are data (``ModelConfig.initial_rules``).

A rule maps uniform float64 numbers to values by the inverse distribution function, element by element; the result is
rounded to float32. `Tensor.normal_` draws other numbers with other vector instructions, and may with another torch.
"""

import hashlib
import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from fnmatch import fnmatch
from functools import partial
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from vitpar.models.config import ModelConfig, Rule, Rules
from vitpar.models.layers import Layer
from vitpar.threads import compute_alone, in_threads

CHUNK = 2**22
"""Elements drawn at once: limits the memory of float64 numbers beside large parameters."""
TOGETHER = 12
"""Parameters that threads draw in turn, about those of a block."""


def constant(value: float) -> Rule:
    """Return the rule that gives `value` everywhere."""
    return lambda v, shape, c: torch.full_like(v, value)


def normal(std: float, mean: float = 0.0) -> Rule:
    """Return the rule of a normal distribution."""
    return lambda v, shape, c: v.erfinv_().mul_(math.sqrt(2) * std).add_(mean)


def lecun_normal(v: Tensor, shape: torch.Size, c: Any) -> Tensor:
    """Normal numbers cut at two deviations, with a deviation of 1/sqrt(fan in) after the cut."""
    std = 1 / math.sqrt(shape[1]) / 0.87962566103423978  # the deviation of a standard normal that is cut there
    return normal(std)(v.mul_(math.erf(2 / math.sqrt(2))), shape, c)


def fan_in_uniform(v: Tensor, shape: torch.Size, c: Any) -> Tensor:
    """``nn.Linear.reset_parameters`` for a weight."""
    return v.div_(math.sqrt(shape[1]))


def xavier_uniform(parts: int = 1) -> Rule:
    """Return Xavier's uniform rule for `parts` matrices stacked in one parameter (queries, keys and values)."""
    return lambda v, shape, c: v.mul_(math.sqrt(6 / (shape[0] // parts + shape[1])))


def patch_convolution(v: Tensor, shape: torch.Size, c: Any) -> Tensor:
    """``nn.Conv2d.reset_parameters`` for the patches' weight and bias."""
    return v.div_(math.sqrt(c.channels * c.patch_size**2))


PLAIN: Rules = (
    ("*.bias", constant(0.0)),
    # Ones for the factors of a norm, which have one dimension.
    ("*.weight", lambda v, shape, c: torch.ones_like(v) if len(shape) == 1 else normal(0.02)(v, shape, c)),
    ("*", normal(0.02)),
)
"""The rules of a model whose family has none of its own."""


_SEEDING_NAMES = (
    (r"\bembed\.patch_embed\.proj\.", "stem.proj."),
    (r"\bembed\.", "stem."),
    (r"\.ls([12])\.gamma$", r".gamma\1"),
)
"""Pattern of a parameter's name and its replacement in the name that seeds its random numbers; the first that matches
decides. Changing a line changes the initial values of every model that has such parameters."""


def seeding_name(parameter: str) -> str:
    """Return the name under which the initial random numbers of `parameter` are drawn."""
    for pattern, replacement in _SEEDING_NAMES:
        seeding, times = re.subn(pattern, replacement, parameter, count=1)
        if times:
            return seeding
    return parameter


def initial_value(name: str, shape: torch.Size, seed: int, config: ModelConfig) -> Tensor:
    """Return the whole initial value of parameter `name`, float32 on the CPU."""
    rule = next(rule for pattern, rule in config.initial_rules() if fnmatch(name, pattern))
    digest = hashlib.blake2b(f"{seed}/{seeding_name(name)}".encode(), digest_size=8).digest()
    generator = Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
    value = torch.empty(shape, dtype=torch.float32)
    by_place, start = getattr(rule, "by_place", False), 0
    for part in value.view(-1).split(CHUNK):
        # Multiples of 2^-53 become the odd ones between -1 and 1, exactly: never ±1, where erfinv is infinite.
        v = torch.rand(part.shape, dtype=torch.float64, generator=generator).mul_(2).add_(2**-53 - 1)
        part.copy_(rule(v, shape, config, start) if by_place else rule(v, shape, config))
        start += part.numel()
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


def initial_values(
    shapes: Mapping[str, torch.Size], seed: int, config: ModelConfig, threads: int = 0
) -> Iterator[tuple[str, Tensor]]:
    """Yield names and initial values of parameters.

    threads: number of threads that draw; 0 draws in the calling one. They draw blocks ahead.
    """
    names, undrawn = list(shapes), torch.empty(0)
    # Made one after the other, so that their values are freed.
    jobs = (dict.fromkeys(names[i : i + TOGETHER], undrawn) for i in range(0, len(names), TOGETHER))

    def draw(values: dict[str, Tensor], name: str) -> None:
        values[name] = initial_value(config.owner(name), shapes[name], seed, config)

    def draws(values: dict[str, Tensor]) -> list[Callable[[], None]]:
        return [partial(draw, values, name) for name in values]

    before = torch.get_num_threads()
    with closing(in_threads(jobs, draws, threads, compute_alone)) as drawn:
        for values in drawn:
            yield from values.items()
    if threads:
        torch.set_num_threads(before)


@torch.no_grad()
def initialise(model: nn.Module, seed: int, config: ModelConfig) -> None:
    """Fill every parameter and buffer of `model`, a whole model or a stage of it, already on its device.

    Large models for a GPU are drawn on as many threads as torch uses. On a CPU that would slow down attention later, as
    ``vitpar.launch.process_group.share_cores`` says of `set_num_threads`.
    """
    parameters = dict(model.named_parameters())
    on_gpu = any(parameter.device.type == "cuda" for parameter in parameters.values())
    large = sum(parameter.numel() for parameter in parameters.values()) >= CHUNK
    shapes = {name: parameter.shape for name, parameter in parameters.items()}
    for name, whole in initial_values(shapes, seed, config, torch.get_num_threads() if on_gpu and large else 0):
        copy_whole_(parameters[name], whole)
    for module in model.modules():
        if isinstance(module, Layer):
            module.reset_buffers()
