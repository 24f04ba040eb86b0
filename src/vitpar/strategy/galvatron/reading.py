"""From a file of Galvatron's to a plan."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from vitpar.errors import StrategyError, shown
from vitpar.strategy.galvatron.keys import KEYS, OF_BLOCKS, OUTSIDE_SHARDED, REQUIRED, SCHEDULE_NAMES, check_batch
from vitpar.strategy.json_file import check_record, read_json
from vitpar.strategy.layer import Axis, Strategy, refuse_many_ranks
from vitpar.strategy.plan import Plan
from vitpar.strategy.selectors import Groups
from vitpar.strategy.stages import split_blocks
from vitpar.strategy.words import closest, count, divisors, either


@dataclass(frozen=True)
class Imported:
    """What a file of Galvatron's says: the plan, images a step, the number of blocks, and sentences on where Galvatron
    would or could run it otherwise."""

    plan: Plan
    batch_size: int
    num_blocks: int
    notes: tuple[str, ...] = ()


def from_galvatron(data: dict[str, Any], world_size: int, num_blocks: int | None = None) -> Imported:
    """The plan that `data` says for `world_size` ranks.

    num_blocks: of the model, None where the file's own number will do. Stem and head always get one strategy, and
    where the blocks have it too the plan is uniform. Raises StrategyError naming the block or key that vitpar cannot
    run or read.
    """
    assert world_size >= 1, f"a world has at least one rank, not {world_size}"
    refuse_many_ranks(world_size, "the world")
    _check_keys(data)
    pp = data["pp_deg"]
    if world_size % pp:
        raise StrategyError(
            f"pp_deg {pp} does not divide {count(world_size, 'rank')}: use {either(closest(divisors(world_size), pp))}"
        )
    stage = world_size // pp
    columns = _columns(data)
    depth = len(columns["tp_sizes_enc"])
    if num_blocks not in (None, depth):
        raise StrategyError(
            f"tp_sizes_enc has {count(depth, 'block')} but the model {num_blocks}: use a file made for it"
        )
    outside = _strategy("stem and head (vtp)", _outside_blocks(data), stage, data)
    blocks = [
        _strategy(f"block {index}", {key: column[index] for key, column in columns.items()}, stage, data)
        for index in range(depth)
    ]
    layers: Groups = (("*", outside),)
    if set(blocks) != {outside}:
        layers = (("stem", outside), *((str(index), block) for index, block in enumerate(blocks)), ("head", outside))
    schedule = SCHEDULE_NAMES[data.get("pipeline_type", "gpipe")] if pp > 1 else Plan().schedule
    plan = Plan(layers, pp, schedule=schedule, microbatches=_chunks(data, stage), split=_split(data, depth))
    check_batch(plan, data["global_bsz"])
    return Imported(plan, data["global_bsz"], depth, tuple(_notes(data, plan)))


def read_galvatron(path: str | os.PathLike[str], world_size: int, num_blocks: int | None = None) -> Imported:
    """`from_galvatron` of the file `path`. Raises StrategyError, naming the file, also when it cannot be read."""
    data = read_json(path)
    try:
        return from_galvatron(data, world_size, num_blocks)
    except StrategyError as error:
        raise StrategyError(f"{shown(path)}: {error}") from None


def _check_keys(data: dict[str, Any]) -> None:
    if isinstance(data, dict) and "pp_size" in data:
        raise StrategyError("'pp_size' belongs to another kind of file: give one with pp_deg and tp_sizes_enc")
    check_record(data, KEYS, REQUIRED, "the Galvatron plan")
    here, there = (data.get(key) for key in OUTSIDE_SHARDED)
    if None not in (here, there) and here != there:
        raise StrategyError(f"embed_sdp is {here} but vocab_sdp, its other name, {there}: leave out one of them")


def _columns(data: dict[str, Any]) -> dict[str, list[int]]:
    """By key the values of all blocks, those of absent keys included."""
    depth = len(_numbers(data["tp_sizes_enc"]))
    columns = {}
    for key, (absent, allowed, why) in OF_BLOCKS.items():
        column = columns[key] = _numbers(data[key]) if key in data else [absent] * depth
        if len(column) != depth:
            raise StrategyError(
                f"{key} has {count(len(column), 'value')} but tp_sizes_enc {depth}: give one for each block"
            )
        for index, value in enumerate(column):
            if allowed and value not in allowed:
                raise StrategyError(f"block {index}: {key} is {value}{why}: use {either(allowed)}")
    return columns


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def _outside_blocks(data: dict[str, Any]) -> dict[str, int]:
    """What the file says of stem and head, by the keys of blocks."""
    sharded = next((data[key] for key in OUTSIDE_SHARDED if key in data), 0)
    values = {"tp_sizes_enc": data.get("vtp", 1), "dp_types_enc": sharded, "use_sp": data.get("vsp", 0)}
    return {key: absent for key, (absent, _, _) in OF_BLOCKS.items()} | values


def _strategy(where: str, values: dict[str, int], stage: int, data: dict[str, Any]) -> Strategy:
    """The strategy of the layer that messages call `where`, on a stage of so many ranks."""
    tp, default = values["tp_sizes_enc"], data.get("default_dp_type", "ddp")
    if tp < 1 or stage % tp:
        raise StrategyError(
            f"{where}: tp {tp} does not divide the {count(stage, 'rank')} of a stage: "
            f"use {either(closest(divisors(stage), tp))}"
        )
    if values["use_sp"] and tp > 1:
        key = "use_sp" if where.startswith("block") else "vsp"
        raise StrategyError(
            f"{where}: vitpar has no Ulysses sequence parallelism, here over {tp} ranks: set {key} to 0 for tp{tp}"
        )
    sharded = values["dp_types_enc"] == 1 or default == "zero3"
    data_axis = Axis("fsdp" if sharded else "dp", stage // tp)
    axes = (data_axis, Axis("tp", tp)) if values["tp_consecutive_flags"] else (Axis("tp", tp), data_axis)
    return Strategy(
        tuple(axis for axis in axes if axis.degree != 1),
        zero=2 if default == "zero2" and not sharded and data_axis.size > 1 else 0,
        checkpoint="full" if values["checkpoint"] else None,
    )


def _is_of_2022(data: dict[str, Any]) -> bool:
    return data.keys().isdisjoint(("vtp", "use_sp", "default_dp_type", "pipeline_type"))


def _chunks(data: dict[str, Any], stage: int) -> int:
    """Micro-batches of a step."""
    if data["chunks"] != -1:
        return int(data["chunks"])
    if _is_of_2022(data):
        raise StrategyError("chunks is -1, whose rule depends on the Galvatron that ran this older file: give a number")
    return 1 if data["pp_deg"] == 1 else max(1, math.ceil(data["global_bsz"] // stage / 4))


def _split(data: dict[str, Any], depth: int) -> str | tuple[int, ...]:
    """The blocks of each stage, "even" where that deals the same."""
    pp, key = data["pp_deg"], "pp_division" if "pp_division" in data else "pp_deg"
    sizes = (*[depth // pp] * (pp - 1), depth - depth // pp * (pp - 1))
    if key == "pp_division":
        sizes = tuple(_numbers(data[key]))
    try:
        return "even" if split_blocks(depth, pp, sizes) == split_blocks(depth, pp, "even") else sizes
    except StrategyError as error:
        raise StrategyError(f"{key}: {error}") from None


def _notes(data: dict[str, Any], plan: Plan) -> Iterator[str]:
    """Where Galvatron may run the file otherwise, and what is not in it."""
    if data["chunks"] == -1:
        yield f"chunks is -1, which Galvatron's rule makes {plan.microbatches}."
    if plan.microbatches != 1 and any(strategy.zero for strategy in plan.kinds):
        yield "Galvatron's zero2 keeps whole gradients until the last micro-batch, unless told otherwise at run time."
    silent = [("pipeline_type", "gpipe")] if plan.pp != 1 else []
    if not _is_of_2022(data):
        silent += [("default_dp_type", "ddp")] if any(strategy.has("dp") for strategy in plan.kinds) else []
        silent += [("embed_sdp", "0")] if plan.layers[0][1].has("dp") and "vocab_sdp" not in data else []
    if absent := [f"{key} as {value}" for key, value in silent if key not in data]:
        yield f"Galvatron has run-time flags for what the file leaves out, read by their defaults: {', '.join(absent)}."
    tensor = any(strategy.has("tp") for strategy in plan.kinds)
    yield f"The file does not say the precision{', nor whether tp has sequence parallelism (+sp)' if tensor else ''}."
