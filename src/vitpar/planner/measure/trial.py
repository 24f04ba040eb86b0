"""Rough duration of a training, from one block of the model's width that is timed on this device in a moment."""

from __future__ import annotations

import time

import torch
from torch import nn

from vitpar.launch import find_world
from vitpar.launch.resources import cpu_cores
from vitpar.models import ModelConfig
from vitpar.models.derived import with_frozen
from vitpar.parallel.precision import resolve_precision
from vitpar.planner.cost.pipeline import idle_share
from vitpar.recipe import Recipe
from vitpar.strategy import Plan, batch_arithmetic
from vitpar.tasks.inputs import input_rate
from vitpar.text import rough_duration

MOST_FLOPS = {"cpu": 1e10, "cuda": 1e12}
"""FLOPs of the timed block at most, by device: more rows would take longer and be hardly faster."""
LEAST_S = 0.3
"""Seconds that the block is timed for at least."""


def duration_words(recipe: Recipe, config: ModelConfig, plan: Plan, steps: int, where: str) -> str:
    """Return text such as `about 3 min, within a factor of 2, from one block timed on this machine; …`.

    The FLOPs of the model count at the rate of the block, on all devices, or on all cores, which ranks share. Steps
    wait for images that the machines prepare more slowly (`input_rate`).

    where: name of the device.
    """
    device = torch.device(where)
    batch, threads = batch_arithmetic(plan, recipe.train.batch_size), torch.get_num_threads()
    rate = _block_rate(config, recipe.train.precision, batch.microbatch_size, device)
    at_once = plan.world_size if device.type == "cuda" else min(plan.world_size, max(1, cpu_cores() // threads))
    flops = with_frozen(config, recipe.frozen(config)).flops * recipe.train.batch_size * steps
    seconds = flops / (rate * at_once) / (1 - idle_share(plan, batch.microbatches))
    images, world = recipe.train.batch_size * steps, find_world()
    prepared = input_rate(recipe, config, device.type)
    prepared = prepared and prepared * (world.size // world.local_size if world else 1)
    longer = max(seconds, images / prepared) if prepared else seconds
    about = f"about {rough_duration(longer)}, within a factor of 2, from one block timed on this machine"
    if not prepared:
        return f"{about}; plus evaluation, messages and waiting for data"
    rates = f"the model takes {images / seconds:,.0f} images/s, the CPUs prepare {prepared:,.0f}"
    return f"{about}: {rates}; plus evaluation and messages"


def _block_rate(config: ModelConfig, precision: str, rows: int, device: torch.device) -> float:
    """Return the FLOP/s of forward and backward of an encoder block with the model's tokens and features."""
    shape = next(kind.takes for kind in config.block_kinds if kind.takes is not None)
    tokens, width = shape.tokens, shape.features
    flops = 3 * tokens * (24 * width**2 + 4 * tokens * width)
    rows = max(1, min(rows, int(MOST_FLOPS[device.type] // flops)))
    heads = next(heads for heads in (width // 64, 1) if heads and width % heads == 0)
    dtype = resolve_precision(precision).compute
    with torch.random.fork_rng([]):  # the training's random numbers stay as they are
        block = nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
    block.to(device, dtype)
    x = torch.ones(rows, tokens, width, device=device, dtype=dtype, requires_grad=True)

    def clock() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            return time.perf_counter()
        return time.process_time() / torch.get_num_threads()  # other programs may use the cores in turn

    block(x).sum().backward()  # allocates
    begun, times = clock(), 0
    while clock() - begun < LEAST_S:
        block(x).sum().backward()
        times += 1
    return rows * flops * times / (clock() - begun)
