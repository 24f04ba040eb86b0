"""Reader of Galvatron's strategy files.

A file is one JSON object. Values per block are text of integers, as in "2,2,4". The file does not contain the number
of ranks N. With S = N / pp_deg ranks per stage, t of a block's tp_sizes_enc, and d = S / t:

| key (value if absent) | value | in a plan |
|---|---|---|
| pp_deg | stages | pp, outermost |
| tp_sizes_enc | t, which divides S | tp t |
| tp_consecutive_flags | 1: tp ranks are neighbours; 0: d ranks are (irrelevant if t or d is 1) | tp last; tp first |
| dp_types_enc | 1: zero3; 0: default_dp_type | fsdp d; see default_dp_type |
| global_bsz | images per step, over all ranks | batch size |
| chunks | micro-batches per step, -1 = by Galvatron's rule | microbatches |
| checkpoint (zeros) | 1: the block is recomputed | +ckpt |
| pp_division (equal, the rest to the last stage) | blocks of each stage | split |
| pipeline_type (gpipe) | gpipe, pipedream_flush; irrelevant if pp_deg is 1 | schedule gpipe, 1f1b |
| default_dp_type (ddp) | ddp; zero2; zero3 | dp d; dp d and +zero2; fsdp d |
| vtp (1) | t of embed and head; tp ranks are neighbours | tp of embed and head |
| embed_sdp (0), or vocab_sdp | dp_types_enc of embed and head | role of d in embed and head |
| use_sp (zeros), vsp (0) | 1: t is Ulysses, in blocks; in embed and head | refused if t is above 1 |
| cp_sizes_enc (ones), vcp (1) | context parallel | refused above 1 |
| ep_sizes_enc, tp_of_ep_sizes_enc (ones) | expert parallel | refused above 1 |

The files of 2022 lack all of vtp, use_sp, default_dp_type and pipeline_type; the values for absent keys fit them too.
Galvatron runs micro-batches of unequal sizes; they are refused here.

Values of a T5 are those of its encoder, then of its decoder. vitpar's block between them, which embeds the decoder's
ids, has no value: it has the strategy of embed and head, and the stage of the block behind it, as in Galvatron.

Source: Galvatron (PKU-DAIR/Hetu-Galvatron), galvatron/utils/config_utils.py and core/runtime/hybrid_parallel_config.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from vitpar.errors import StrategyError
from vitpar.io import PathLike
from vitpar.limits import MAX_BATCH_SIZE, MAX_BLOCKS, MAX_RANKS
from vitpar.models.description import LayerDescription
from vitpar.records import Record, first_wrong
from vitpar.strategy.batch import batch_arithmetic
from vitpar.strategy.layer import Axis, Strategy, refuse_many_ranks
from vitpar.strategy.plan import Plan
from vitpar.strategy.plan_json import read_json
from vitpar.strategy.selectors import Groups
from vitpar.strategy.stages import split_blocks
from vitpar.text import closest, count, divisors, either, shown

SCHEDULE_NAMES = {"gpipe": "gpipe", "pipedream_flush": "1f1b"}
"""Schedule in a plan by Galvatron's name."""
_NUMBERS = re.compile(r" *[0-9]{1,9} *(, *[0-9]{1,9} *)*")


def _numbers(text: object) -> list[int]:
    """Return the integers in text such as "2,2,4"; raise ValueError for anything else."""
    if not isinstance(text, str) or text.count(",") >= MAX_BLOCKS or not _NUMBERS.fullmatch(text):
        raise ValueError('give whole numbers as text, as in "2,2,4"')
    return [int(number) for number in text.split(",")]


_PerBlock = Annotated[tuple[int, ...], BeforeValidator(_numbers)]
_Degree = Annotated[int, Field(strict=True, ge=1, le=MAX_RANKS)]
_Flag = Annotated[int, Field(strict=True, ge=0, le=1)]


class GalvatronFile(Record):
    """Schema of a strategy file: the keys of the module's table, values per block as lists."""

    pp_deg: _Degree
    tp_sizes_enc: _PerBlock
    tp_consecutive_flags: _PerBlock
    dp_types_enc: _PerBlock
    use_sp: _PerBlock = ()
    checkpoint: _PerBlock = ()
    cp_sizes_enc: _PerBlock = ()
    ep_sizes_enc: _PerBlock = ()
    tp_of_ep_sizes_enc: _PerBlock = ()
    global_bsz: int = Field(strict=True, ge=1, le=MAX_BATCH_SIZE)
    chunks: int = Field(strict=True, ge=-1, le=MAX_BATCH_SIZE)
    pp_division: _PerBlock = ()
    pipeline_type: Literal["gpipe", "pipedream_flush"] = "gpipe"
    default_dp_type: Literal["ddp", "zero2", "zero3"] = "ddp"
    vtp: _Degree = 1
    vsp: _Flag = 0
    embed_sdp: _Flag = 0
    vocab_sdp: _Flag = 0
    vcp: int = Field(1, strict=True, ge=1, le=1)


_BLOCKS: dict[str, tuple[int, tuple[int, ...], str]] = {  # value where absent, values that are read, why no others
    "tp_sizes_enc": (1, (), ""),
    "tp_consecutive_flags": (1, (0, 1), ""),
    "dp_types_enc": (0, (0, 1), ""),
    "use_sp": (0, (0, 1), ""),
    "checkpoint": (0, (0, 1), ", and vitpar recomputes whole blocks"),
    "cp_sizes_enc": (1, (1,), ", and vitpar has no context parallelism"),
    "ep_sizes_enc": (1, (1,), ", and vitpar has no expert parallelism"),
    "tp_of_ep_sizes_enc": (1, (1,), ", and vitpar has no expert parallelism"),
}


@dataclass(frozen=True)
class ImportedPlan:
    """Content of a Galvatron strategy file."""

    plan: Plan
    """The plan."""
    batch_size: int
    """Global images per step."""
    num_blocks: int
    """Number of blocks of the model."""
    notes: tuple[str, ...] = ()
    """Sentences on how Galvatron may run the file differently."""


def unlisted_blocks(layers: Iterable[LayerDescription]) -> tuple[int, ...]:
    """Return the numbers of the blocks without values in a file: those that embed token ids."""
    blocks = (layer for layer in layers if layer.is_block)
    return tuple(index for index, block in enumerate(blocks) if block.embeds_ids)


def read_galvatron(
    path: PathLike, world_size: int, num_blocks: int | None = None, unlisted: Sequence[int] = ()
) -> ImportedPlan:
    """Read the file `path` with `from_galvatron`. Raises StrategyError naming the file if it is missing or invalid."""
    data = read_json(path)
    try:
        return from_galvatron(data, world_size, num_blocks, unlisted)
    except StrategyError as error:
        raise StrategyError(f"{shown(path)}: {error}") from None


def from_galvatron(
    data: dict[str, Any], world_size: int, num_blocks: int | None = None, unlisted: Sequence[int] = ()
) -> ImportedPlan:
    """Return the plan that `data` describes for `world_size` ranks.

    Embed and head share one strategy; if all blocks have it too, the plan is uniform.

    num_blocks: number of blocks of the model, checked against the file; None for that of the file
    unlisted: numbers of the blocks without values in the file (`unlisted_blocks`), by rising number

    Raises StrategyError naming the block or key that vitpar cannot run or read.
    """
    assert world_size >= 1, f"the world size is {world_size}: use at least 1"
    refuse_many_ranks(world_size, "the world")
    file = _checked(data)
    pp = file.pp_deg
    if world_size % pp:
        raise StrategyError(
            f"pp_deg {pp} does not divide {count(world_size, 'rank')}: use {either(closest(divisors(world_size), pp))}"
        )
    stage = world_size // pp
    columns = _columns(file)
    listed = len(file.tp_sizes_enc)
    if num_blocks is not None and num_blocks - len(unlisted) != listed:
        raise StrategyError(
            f"tp_sizes_enc has {count(listed, 'block')} but the model {num_blocks - len(unlisted)}: "
            "use a file made for it"
        )
    # The file has other keys for embed and head: collect their values under the keys of blocks.
    sharded = file.embed_sdp if _says(file, "embed_sdp") else file.vocab_sdp
    ends = {key: absent for key, (absent, _, _) in _BLOCKS.items()}
    ends |= {"tp_sizes_enc": file.vtp, "dp_types_enc": sharded, "use_sp": file.vsp}
    outside = _strategy("embed and head (vtp)", ends, stage, file.default_dp_type)
    blocks = [
        _strategy(
            f"block {index}", {key: column[index] for key, column in columns.items()}, stage, file.default_dp_type
        )
        for index in range(listed)
    ]
    for index in unlisted:
        blocks.insert(index, outside)
    layers: Groups = (("*", outside),)
    if set(blocks) != {outside}:
        layers = (("embed", outside), *((str(index), block) for index, block in enumerate(blocks)), ("head", outside))
    schedule = SCHEDULE_NAMES[file.pipeline_type] if pp > 1 else Plan().schedule
    plan = Plan(layers, pp, schedule=schedule, microbatches=_chunks(file, stage), split=_split(file, unlisted))
    # As gpipe runs any number of micro-batches: `validate` checks what the schedule requires.
    batch_arithmetic(replace(plan, schedule="gpipe"), file.global_bsz)
    return ImportedPlan(plan, file.global_bsz, len(blocks), tuple(_notes(file, plan)))


def _checked(data: dict[str, Any]) -> GalvatronFile:
    """Return `data` as a record. Raises StrategyError if it is invalid or contradicts itself."""
    if "pp_size" in data:
        raise StrategyError("'pp_size' is a key of another file format: use a file with pp_deg and tp_sizes_enc")
    try:
        file = GalvatronFile.model_validate(data)
    except ValueError as error:
        raise StrategyError(f"the Galvatron plan is wrong: {first_wrong(error)}: correct it") from None
    if file.chunks == 0:
        raise StrategyError("chunks is 0: use the number of micro-batches of a step, or -1 for Galvatron's rule")
    here, there = file.embed_sdp, file.vocab_sdp
    if _says(file, "embed_sdp") and _says(file, "vocab_sdp") and here != there:
        raise StrategyError(f"embed_sdp is {here} but its alias vocab_sdp is {there}: leave out one of them")
    return file


def _says(file: GalvatronFile, *keys: str) -> bool:
    """Return whether the file contains one of `keys`."""
    return not file.model_fields_set.isdisjoint(keys)


def _columns(file: GalvatronFile) -> dict[str, Sequence[int]]:
    """Return the values of all blocks by key, with defaults for absent keys. Raises StrategyError for other values."""
    depth = len(file.tp_sizes_enc)
    columns: dict[str, Sequence[int]] = {}
    for key, (absent, allowed, why) in _BLOCKS.items():
        column = columns[key] = getattr(file, key) if _says(file, key) else [absent] * depth
        if len(column) != depth:
            raise StrategyError(
                f"{key} has {count(len(column), 'value')} but tp_sizes_enc {depth}: give one for each block"
            )
        for index, value in enumerate(column):
            if allowed and value not in allowed:
                raise StrategyError(f"block {index}: {key} is {value}{why}: use {either(allowed)}")
    return columns


def _strategy(where: str, values: dict[str, int], stage: int, default: str) -> Strategy:
    """Return the strategy of a layer.

    where: name of the layer in messages
    values: values by the keys of blocks
    stage: number of ranks of the stage
    default: default_dp_type of the file
    """
    tp = values["tp_sizes_enc"]
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


def _is_of_2022(file: GalvatronFile) -> bool:
    """Return whether the file has the older format, without the keys that came later."""
    return not _says(file, "vtp", "use_sp", "default_dp_type", "pipeline_type")


def _chunks(file: GalvatronFile, stage: int) -> int:
    """Return the number of micro-batches per step, by Galvatron's rule if chunks is -1."""
    if file.chunks != -1:
        return file.chunks
    if _is_of_2022(file):
        raise StrategyError("chunks is -1, which depends on the Galvatron version in this older file: set a number")
    return 1 if file.pp_deg == 1 else max(1, math.ceil(file.global_bsz // stage / 4))


def _split(file: GalvatronFile, unlisted: Sequence[int]) -> str | tuple[int, ...]:
    """Return `Plan.split`: the number of blocks of each stage, or "even" if that gives the same."""
    # Galvatron gives the remaining blocks to the last stage, `Plan` to the first ones.
    listed, pp, key = len(file.tp_sizes_enc), file.pp_deg, "pp_division" if _says(file, "pp_division") else "pp_deg"
    sizes = [*[listed // pp] * (pp - 1), listed - listed // pp * (pp - 1)]
    if key == "pp_division":
        sizes = [*file.pp_division]
    try:
        split_blocks(listed, pp, tuple(sizes))
    except StrategyError as error:
        raise StrategyError(f"{key}: {error}") from None
    for index in unlisted:
        ends = accumulate(sizes)
        sizes[next((stage for stage, end in enumerate(ends) if index < end), pp - 1)] += 1
    depth = sum(sizes)
    even = split_blocks(depth, pp, tuple(sizes)) == split_blocks(depth, pp, "even")
    return "even" if even else tuple(sizes)


def _notes(file: GalvatronFile, plan: Plan) -> Iterator[str]:
    """Yield sentences on how Galvatron may run the file differently, and on what the file leaves out."""
    if file.chunks == -1:
        yield f"chunks is -1, which Galvatron resolves to {plan.microbatches}."
    if plan.microbatches != 1 and any(strategy.zero for strategy in plan.distinct):
        yield "Galvatron's zero2 keeps unsharded gradients until the last micro-batch, unless run-time options differ."
    silent = [("pipeline_type", "gpipe")] if plan.pp != 1 else []
    if not _is_of_2022(file):
        silent += [("default_dp_type", "ddp")] if any(strategy.has("dp") for strategy in plan.distinct) else []
        silent += [("embed_sdp", "0")] if plan.layers[0][1].has("dp") and not _says(file, "vocab_sdp") else []
    if absent := [f"{key} as {value}" for key, value in silent if not _says(file, key)]:
        yield f"The file lacks keys that are run-time flags in Galvatron, assumed as default: {', '.join(absent)}."
    tensor = any(strategy.has("tp") for strategy in plan.distinct)
    yield f"The file does not say the precision{', nor whether tp has sequence parallelism (+sp)' if tensor else ''}."
