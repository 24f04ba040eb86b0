"""Galvatron's strategy files, read and written.

A file is one JSON object. What differs from block to block is text of whole numbers, one per block: "2,2,4". The file
does not say the number of ranks N. With S = N / pp_deg ranks in a stage, t of a block's tp_sizes_enc and d = S / t:

| key | value | here |
|---|---|---|
| pp_deg | stages | pp, outermost |
| tp_sizes_enc | t, which divides S | tp t |
| tp_consecutive_flags | 1: tp ranks are neighbours; 0: d ranks are (no matter where t or d is 1) | tp last; tp first |
| dp_types_enc | 1: zero3; 0: default_dp_type | fsdp d; see below |
| global_bsz | images a step, over all ranks | batch size |
| chunks | micro-batches a step, -1 = by Galvatron's rule | microbatches |
| checkpoint (zeros) | 1: the block is recomputed | +ckpt |
| pp_division (equal, the rest to the last stage) | blocks of each stage | split |
| pipeline_type (gpipe) | gpipe, pipedream_flush; no matter where pp_deg is 1 | schedule gpipe, 1f1b |
| default_dp_type (ddp) | ddp; zero2; zero3 | dp d; dp d and +zero2; fsdp d |
| vtp (1) | t of all that is outside blocks; tp ranks are neighbours | tp of stem and head |
| embed_sdp (0), or vocab_sdp | dp_types_enc of all that is outside blocks | role of d in stem and head |
| use_sp (zeros), vsp (0) | 1: t is Ulysses, of blocks and outside them | refused where t is above 1 |
| cp_sizes_enc (ones), vcp (1) | context parallel | refused above 1 |
| ep_sizes_enc, tp_of_ep_sizes_enc (ones) | expert parallel | refused above 1 |

In brackets: the value where a key is absent. The files of 2022 lack all of vtp, use_sp, default_dp_type and
pipeline_type; these values fit them too. Galvatron runs micro-batches of unequal sizes; here they are refused.

Source: Galvatron (PKU-DAIR/Hetu-Galvatron), galvatron/utils/config_utils.py and core/runtime/hybrid_parallel_config.py.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vitpar.errors import StrategyError
from vitpar.strategy.batch import batch_arithmetic
from vitpar.strategy.layer import Axis, Strategy
from vitpar.strategy.plan import Plan
from vitpar.strategy.selectors import Groups
from vitpar.strategy.serialize import _check_record, _Fits, _Keys, _unique_keys
from vitpar.strategy.stages import split_blocks
from vitpar.strategy.words import closest, count, divisors, either

_NUMBERS = re.compile(r" *[0-9]{1,9} *(, *[0-9]{1,9} *)*")
_OUTSIDE_SHARDED = ("embed_sdp", "vocab_sdp")
_SCHEDULES = {"gpipe": "gpipe", "pipedream_flush": "1f1b"}


@dataclass(frozen=True)
class Imported:
    """What a file of Galvatron's says: the plan, images a step, the number of blocks, and sentences on where Galvatron
    would or could run it otherwise."""

    plan: Plan
    batch_size: int
    num_blocks: int
    notes: tuple[str, ...] = ()


def is_galvatron(data: object) -> bool:
    """Whether JSON `data` is a strategy of Galvatron's rather than a plan of vitpar's."""
    return isinstance(data, dict) and "tp_sizes_enc" in data


def from_galvatron(data: dict[str, Any], world_size: int, num_blocks: int | None = None) -> Imported:
    """The plan that `data` says for `world_size` ranks.

    num_blocks: of the model, None where the file's own number will do. Stem and head always get one strategy, and
    where the blocks have it too the plan is uniform. Raises StrategyError naming the block or key that vitpar cannot
    run or read.
    """
    assert world_size >= 1, f"a world has at least one rank, not {world_size}"
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
    schedule = _SCHEDULES[data.get("pipeline_type", "gpipe")] if pp > 1 else Plan().schedule
    plan = Plan(layers, pp, schedule=schedule, microbatches=_chunks(data, stage), split=_split(data, depth))
    _check_batch(plan, data["global_bsz"])
    return Imported(plan, data["global_bsz"], depth, tuple(_notes(data, plan)))


def to_galvatron(plan: Plan, num_blocks: int, batch_size: int, costs: Sequence[float] | None = None) -> dict[str, Any]:
    """The plan as Galvatron's JSON, every key that it knows of a model without experts.

    costs: of the layers, for split "balanced", as ``split_blocks`` takes them. Raises StrategyError naming the layer or
    the field that Galvatron's file cannot say.
    """
    for what, fix in _beyond_plan(plan):
        raise StrategyError(f"the plan ({plan}) has {what}, which Galvatron's file cannot say: {fix}")
    if plan.microbatches is None:
        raise StrategyError(f"the plan ({plan}) has no number of micro-batches, which Galvatron's file needs: give one")
    names = ("stem", *(f"blocks.{index}" for index in range(num_blocks)), "head")
    layers = {name.replace("blocks.", "block "): layer for name, layer in plan.strategies(names).items()}
    _check_layers(layers)
    _check_batch(plan, batch_size)
    outside, *blocks = list(layers.values())[:-1]
    zero = any(layer.zero for layer in layers.values())

    def column(values: Iterable[int]) -> str:
        return ",".join(map(str, values))

    return {
        "pp_deg": plan.pipeline_degree,
        "tp_sizes_enc": column(block.degree("tp") for block in blocks),
        "tp_consecutive_flags": column(int(not _is_strided(block)) for block in blocks),
        "dp_types_enc": column(int(block.has("fsdp")) for block in blocks),
        "use_sp": column(0 for _ in blocks),
        "checkpoint": column(int(block.checkpoint is not None) for block in blocks),
        "global_bsz": batch_size,
        "chunks": plan.microbatches,
        "pp_division": column(len(part) for part in split_blocks(num_blocks, plan.pipeline_degree, plan.split, costs)),
        "pipeline_type": "gpipe" if plan.schedule == "gpipe" and plan.pp != 1 else "pipedream_flush",
        "default_dp_type": "zero2" if zero else "ddp",
        "vtp": outside.degree("tp"),
        "vsp": 0,
        "embed_sdp": int(outside.has("fsdp")),
        "cp_sizes_enc": column(1 for _ in blocks),
        "vcp": 1,
    }


def read_galvatron(path: str | os.PathLike[str], world_size: int, num_blocks: int | None = None) -> Imported:
    """`from_galvatron` of the file `path`. Raises StrategyError, naming the file, also when it cannot be read."""
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"), object_pairs_hook=_unique_keys)
        return from_galvatron(data, world_size, num_blocks)
    except StrategyError as error:
        raise StrategyError(f"{path}: {error}") from None
    except OSError as error:
        raise StrategyError(f"cannot read the plan {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # not UTF-8, or not JSON
        raise StrategyError(f"{path} is not JSON: {error}") from None


def write_galvatron(
    path: str | os.PathLike[str], plan: Plan, num_blocks: int, batch_size: int, costs: Sequence[float] | None = None
) -> None:
    """Write `to_galvatron` to `path`, one key a line. A reader sees the old file or the whole new one.

    Raises StrategyError when Galvatron's file cannot say the plan, or cannot be written.
    """
    text = json.dumps(to_galvatron(plan, num_blocks, batch_size, costs), indent=2) + "\n"
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, target)
    except OSError as error:
        raise StrategyError(f"cannot write the plan {path}: {error.strerror}") from None
    finally:
        with suppress(OSError):  # already renamed, or never made
            temporary.unlink()


def _is_count(value: object) -> bool:
    return type(value) is int and 1 <= value <= 10**6


def _is_list(value: object) -> bool:
    return isinstance(value, str) and _NUMBERS.fullmatch(value) is not None


def _one_of(*values: int | str) -> tuple[_Fits, str]:
    return lambda value: type(value) in (int, str) and value in values, either(map(json.dumps, values))


_COUNT: tuple[_Fits, str] = (_is_count, "a whole number from 1 to a million")
_OF_BLOCKS: dict[str, tuple[int, tuple[int, ...], str]] = {  # value where absent, values that are read, why no others
    "tp_sizes_enc": (1, (), ""),
    "tp_consecutive_flags": (1, (0, 1), ""),
    "dp_types_enc": (0, (0, 1), ""),
    "use_sp": (0, (0, 1), ""),
    "checkpoint": (0, (0, 1), ", and vitpar recomputes whole blocks"),
    "cp_sizes_enc": (1, (1,), ", and vitpar has no context parallelism"),
    "ep_sizes_enc": (1, (1,), ", and vitpar has no expert parallelism"),
    "tp_of_ep_sizes_enc": (1, (1,), ", and vitpar has no expert parallelism"),
}
_REQUIRED = ("pp_deg", "tp_sizes_enc", "tp_consecutive_flags", "dp_types_enc", "global_bsz", "chunks")
_KEYS: _Keys = {
    "pp_deg": _COUNT,
    **dict.fromkeys(_OF_BLOCKS, (_is_list, 'whole numbers as text, one per block, as in "2,2,4"')),
    "global_bsz": _COUNT,
    "chunks": (lambda value: _is_count(value) or _one_of(-1)[0](value), f"{_COUNT[1]}, or -1"),
    "pp_division": (_is_list, 'whole numbers as text, one per stage, as in "6,6"'),
    "pipeline_type": _one_of(*_SCHEDULES),
    "default_dp_type": _one_of("ddp", "zero2", "zero3"),
    "vtp": _COUNT,
    "vsp": _one_of(0, 1),
    "embed_sdp": _one_of(0, 1),
    "vocab_sdp": _one_of(0, 1),
    "vcp": (_one_of(1)[0], "1, as vitpar has no context parallelism"),
}


def _check_keys(data: dict[str, Any]) -> None:
    if isinstance(data, dict) and "pp_size" in data:
        raise StrategyError("'pp_size' belongs to another kind of file: give one with pp_deg and tp_sizes_enc")
    _check_record(data, _KEYS, _REQUIRED, "the Galvatron plan")
    here, there = (data.get(key) for key in _OUTSIDE_SHARDED)
    if None not in (here, there) and here != there:
        raise StrategyError(f"embed_sdp is {here} but vocab_sdp, its other name, {there}: leave out one of them")


def _columns(data: dict[str, Any]) -> dict[str, list[int]]:
    """By key the values of all blocks, those of absent keys included."""
    depth = len(_numbers(data["tp_sizes_enc"]))
    columns = {}
    for key, (absent, allowed, why) in _OF_BLOCKS.items():
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
    sharded = next((data[key] for key in _OUTSIDE_SHARDED if key in data), 0)
    values = {"tp_sizes_enc": data.get("vtp", 1), "dp_types_enc": sharded, "use_sp": data.get("vsp", 0)}
    return {key: absent for key, (absent, _, _) in _OF_BLOCKS.items()} | values


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


def _check_batch(plan: Plan, batch_size: int) -> None:
    """Refuse a batch that does not divide, and nothing that a schedule asks, which is the matter of `validate`."""
    batch_arithmetic(replace(plan, schedule="gpipe"), batch_size)


def _beyond_plan(plan: Plan) -> Iterator[tuple[str, str]]:
    """What of the plan beside its layers the file cannot say, and what to use instead."""
    if plan.pp is None:
        yield "an open degree", "give pp a number"
    if plan.pp_index:
        yield "pp behind another axis", f"use {replace(plan, pp_index=0)}"
    if plan.schedule not in _SCHEDULES.values():
        yield f"schedule {plan.schedule}", f"use {either(_SCHEDULES.values())}"
    if plan.virtual_stages > 1:
        yield f"{plan.virtual_stages} virtual stages", "set virtual_stages to 1"


def _beyond_layer(name: str, layer: Strategy) -> Iterator[tuple[str, str]]:
    """What of the layer the file cannot say, and what to use instead."""
    if layer.is_open:
        yield "an open degree", "give every axis a number"
    if layer.tensor_mode != "1d":
        yield f"{layer.tensor_mode} tensor parallelism", f"use {replace(layer, tensor_mode='1d', depth=None)}"
    if layer.sequence_parallel:
        yield "+sp", f"use {replace(layer, sequence_parallel=False)}, and Galvatron's run-time flag for it"
    if layer.has("dp") and layer.has("fsdp"):
        yield "both dp and fsdp", f"use one, dp{layer.data_parallel} or fsdp{layer.data_parallel}"
    if layer.zero == 1:
        yield "+zero1", f"use {replace(layer, zero=2)} or {replace(layer, zero=0)}"
    if layer.offload:
        yield "+offload", f"use {replace(layer, offload=False)}"
    if layer.checkpoint == "selective":
        yield "+ckpt.selective", f"use {replace(layer, checkpoint='full')} or {replace(layer, checkpoint=None)}"
    if name in ("stem", "head"):
        if layer.checkpoint:
            yield "+ckpt outside the blocks", f"use {replace(layer, checkpoint=None)} for stem and head"
        if _is_strided(layer):
            yield "tp as its outer axis", f"use {replace(layer, axes=layer.axes[::-1])} for stem and head"


def _check_layers(layers: dict[str, Strategy]) -> None:
    """Refuse what the file cannot say. layers: by the names that messages have for them."""
    for name, layer in layers.items():
        for what, fix in _beyond_layer(name, layer):
            raise StrategyError(f"{name} ({layer}) has {what}, which Galvatron's file cannot say: {fix}")
    stem, head = layers["stem"], layers["head"]
    if stem != head:
        raise StrategyError(
            f"stem is {stem} but head is {head}, and Galvatron's file has one strategy for both: use either in both"
        )
    replicated = {layer.zero: f"{name} is {layer}" for name, layer in reversed(layers.items()) if layer.has("dp")}
    if len(replicated) > 1:
        raise StrategyError(
            f"{replicated[0]} but {replicated[2]}, and Galvatron's file has one default_dp_type for all: "
            "use +zero2 in both or neither, or fsdp"
        )


def _is_strided(layer: Strategy) -> bool:
    """Whether neighbouring ranks are of another axis than tp."""
    return len(layer.axes) > 1 and layer.axes[0].role == "tp"
