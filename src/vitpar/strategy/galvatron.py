"""Import and export of Galvatron's strategy files: one JSON object, with values per block in text such as "2,2,4".

The file does not contain the number of ranks. Those of 2022 lack most keys; the values for absent keys fit them too.
Galvatron runs micro-batches of unequal sizes; they are refused here.

Values of a T5 are those of its encoder, then of its decoder. vitpar's block between them, which embeds the decoder's
ids, has no value: it has the strategy of embed and head, and the stage of the block behind it, as in Galvatron.

Source: Galvatron (PKU-DAIR/Hetu-Galvatron), galvatron/utils/config_utils.py and core/runtime/hybrid_parallel_config.py.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from vitpar.errors import StrategyError
from vitpar.limits import MAX_BLOCKS, MAX_RANKS
from vitpar.models.description import LayerDescription
from vitpar.records import Record, first_wrong
from vitpar.strategy.batch import batch_arithmetic
from vitpar.strategy.layer import Axis, Strategy, refuse_many_ranks
from vitpar.strategy.plan import Plan
from vitpar.strategy.stages import split_blocks
from vitpar.text import closest, count, divisors, either

_SPLIT = BeforeValidator(lambda text: text.split(",", MAX_BLOCKS) if isinstance(text, str) else text)
_Degree = Annotated[int, Field(ge=1, le=MAX_RANKS)]
_Degrees = Annotated[tuple[_Degree, ...], Field(max_length=MAX_BLOCKS), _SPLIT]
_Flag = Annotated[int, Field(ge=0, le=1)]
_Flags = Annotated[tuple[_Flag, ...], Field(max_length=MAX_BLOCKS), _SPLIT]
_One = Annotated[int, Field(ge=1, le=1)]
_Ones = Annotated[tuple[_One, ...], Field(max_length=MAX_BLOCKS), _SPLIT]


class GalvatronFile(Record):
    """Schema of a strategy file, with the values of absent keys; () is 0 in each block, or 1 where that is required."""

    pp_deg: _Degree
    tp_sizes_enc: _Degrees
    tp_consecutive_flags: _Flags  # 1: ranks of tp are neighbours, so tp is the last axis
    dp_types_enc: _Flags  # 1: zero3; 0: default_dp_type
    use_sp: _Flags = ()  # 1: Ulysses in place of tp
    checkpoint: _Flags = ()  # 1: the block is recomputed
    global_bsz: int
    chunks: int  # micro-batches of a step; -1: by Galvatron's rule
    pp_division: _Degrees = ()  # blocks of each stage; (): equal, the rest to the last stage
    pipeline_type: Literal["gpipe", "pipedream_flush"] = "gpipe"
    default_dp_type: Literal["ddp", "zero2", "zero3"] = "ddp"
    vtp: _Degree = 1  # tp_sizes_enc, use_sp and dp_types_enc of embed and head
    vsp: _Flag = 0
    embed_sdp: _Flag = 0
    cp_sizes_enc: _Ones = ()  # context and expert parallelism, which vitpar does not have
    vcp: _One = 1
    ep_sizes_enc: _Ones = ()
    tp_of_ep_sizes_enc: _Ones = ()


_COLUMNS = ("tp_sizes_enc", "tp_consecutive_flags", "dp_types_enc", "use_sp", "checkpoint")
"""Keys of the values that make the strategy of a block."""


@dataclass(frozen=True)
class ImportedPlan:
    """Content of a Galvatron strategy file."""

    plan: Plan
    """The plan."""
    batch_size: int
    """Global images per step."""
    num_blocks: int
    """Number of blocks of the model."""


def unlisted_blocks(layers: Iterable[LayerDescription]) -> tuple[int, ...]:
    """Return the numbers of the blocks without values in a file: those that embed token ids."""
    blocks = [layer for layer in layers if layer.is_block]
    return tuple(index for index, block in enumerate(blocks) if block.embeds_ids)


def from_galvatron(
    data: dict[str, Any], world_size: int, num_blocks: int | None = None, unlisted: Sequence[int] = ()
) -> ImportedPlan:
    """Return the plan that the content `data` of a file describes for `world_size` ranks.

    num_blocks: number of blocks of the model, checked against the file; None for that of the file
    unlisted: numbers of the blocks without values in the file (`unlisted_blocks`), by rising number

    Raises StrategyError naming the block or key that vitpar cannot run or read.
    """
    refuse_many_ranks(world_size, "the world")
    vocab = data.get("vocab_sdp")  # another name of embed_sdp; unknown below if the two contradict each other
    if vocab == data.get("embed_sdp", vocab):
        data = {"embed_sdp" if key == "vocab_sdp" else key: value for key, value in data.items()}
    try:
        file = GalvatronFile.model_validate(data)
    except ValueError as error:
        raise StrategyError(f"vitpar cannot run the Galvatron plan: {first_wrong(error)}: correct it") from None
    pp, listed = file.pp_deg, len(file.tp_sizes_enc)
    if world_size % pp:
        use = either(closest(divisors(world_size), pp))
        raise StrategyError(f"pp_deg {pp} does not divide {count(world_size, 'rank')}: use {use}")
    expected = listed if num_blocks is None else num_blocks - len(unlisted)
    if listed != expected:
        raise StrategyError(f"the file has {count(listed, 'block')} but the model {expected}: use a file made for it")
    stage, chunks = world_size // pp, file.chunks
    if chunks == -1:  # Galvatron's rule: a quarter of the images of a rank, rounded up
        chunks = 1 if pp == 1 else max(1, -(-(file.global_bsz // stage) // 4))
    *blocks, outside = _strategies(file, stage)
    for index in unlisted:
        blocks.insert(index, outside)
    layers = [("embed", outside), *((str(index), block) for index, block in enumerate(blocks)), ("head", outside)]
    if {*blocks} == {outside}:
        layers = [("*", outside)]
    schedule = "gpipe" if pp > 1 and file.pipeline_type == "gpipe" else "1f1b"
    plan = Plan(tuple(layers), pp, schedule=schedule, microbatches=chunks, split=_split(file, unlisted))
    # As gpipe runs any number of micro-batches: `validate` checks what the schedule requires.
    batch_arithmetic(replace(plan, schedule="gpipe"), file.global_bsz)
    return ImportedPlan(plan, file.global_bsz, len(blocks))


def _strategies(file: GalvatronFile, stage: int) -> Iterator[Strategy]:
    """Yield the strategies of the blocks with values in the file, and then that of embed and head, for a stage."""
    depth = len(file.tp_sizes_enc)
    columns = {key: getattr(file, key) or (0,) * depth for key in _COLUMNS}
    for key, column in columns.items():
        if len(column) != depth:
            raise StrategyError(f"{key} has {len(column)} and tp_sizes_enc {depth} values: give one for each block")
    rows = [*zip(*columns.values(), strict=True), (file.vtp, 1, file.embed_sdp, file.vsp, 0)]
    for index, (tp, consecutive, sharded, ulysses, checkpoint) in enumerate(rows):
        where = f"block {index}" if index < depth else "embed and head (vtp, vsp)"
        if stage % tp:
            use = either(closest(divisors(stage), tp))
            raise StrategyError(f"{where}: tp {tp} does not divide the {count(stage, 'rank')} of a stage: use {use}")
        if ulysses and tp > 1:
            raise StrategyError(f"{where}: vitpar has no Ulysses sequence parallelism: set use_sp or vsp to 0")
        data = Axis("fsdp" if sharded or file.default_dp_type == "zero3" else "dp", stage // tp)
        axes = (data, Axis("tp", tp)) if consecutive else (Axis("tp", tp), data)
        yield Strategy(
            tuple(axis for axis in axes if axis.degree != 1),
            zero=2 if file.default_dp_type == "zero2" and data.role == "dp" and data.size > 1 else 0,
            checkpoint="full" if checkpoint else None,
        )


def _values(strategy: Strategy) -> tuple[int, ...]:
    """Return the values of a block for _COLUMNS."""
    consecutive = all(axis.role != "tp" for axis in strategy.axes[:-1])
    return strategy.degree("tp"), consecutive, strategy.has("fsdp"), 0, strategy.checkpoint is not None


def _split(file: GalvatronFile, unlisted: Sequence[int]) -> str | tuple[int, ...]:
    """Return `Plan.split`: the number of blocks of each stage, or "even" if that gives the same."""
    # Galvatron gives the remaining blocks to the last stage, `Plan` to the first ones.
    listed, pp = len(file.tp_sizes_enc), file.pp_deg
    sizes = [*file.pp_division] or [*[listed // pp] * (pp - 1), listed - listed // pp * (pp - 1)]
    for index in unlisted:
        sizes[min(bisect([*accumulate(sizes)], index), len(sizes) - 1)] += 1
    depth, split = listed + len(unlisted), tuple(sizes)
    return "even" if split_blocks(depth, pp, split) == split_blocks(depth, pp, "even") else split


def to_galvatron(
    plan: Plan, num_blocks: int, batch_size: int, costs: Sequence[float] | None = None, unlisted: Sequence[int] = ()
) -> dict[str, object]:
    """Return a validated plan as Galvatron's JSON, with all its keys for a model without experts.

    costs: costs of the layers for split "balanced", as in ``split_blocks``
    unlisted: numbers of the blocks without values in the file (``unlisted_blocks``)

    Raises StrategyError for what the file cannot express, with what it would be read as.
    """
    names = ("embed", *(f"block {index}" for index in range(num_blocks)), "head")
    layers = plan.strategies(names)
    blocks = [layers[name] for index, name in enumerate(names[1:-1]) if index not in unlisted]
    stages = split_blocks(num_blocks, plan.pipeline_degree, plan.split, costs)

    def text(values: Iterable[int]) -> str:
        return ",".join(str(int(value)) for value in values)

    file: dict[str, object] = {
        "pp_deg": plan.pipeline_degree,
        **dict(zip(_COLUMNS, map(text, zip(*map(_values, blocks), strict=True)), strict=True)),
        "global_bsz": batch_size,
        "chunks": plan.microbatches,
        "pp_division": text(len({*stage}.difference(unlisted)) for stage in stages),
        "pipeline_type": "gpipe" if plan.schedule == "gpipe" and plan.pp != 1 else "pipedream_flush",
        "default_dp_type": "zero2" if any(layer.zero == 2 for layer in layers.values()) else "ddp",
        "vtp": layers["embed"].degree("tp"),
        "vsp": 0,
        "embed_sdp": int(layers["embed"].has("fsdp")),
        "cp_sizes_enc": text(1 for _ in blocks),
        "vcp": 1,
    }

    def facts(of: Plan) -> Iterator[tuple[str, str]]:
        yield "the schedule", of.schedule if of.pp != 1 else ""
        yield "pp", "an inner axis" if of.pp_index else "the outermost axis"
        yield from ((name, str(strategy)) for name, strategy in of.strategies(names).items())
        # The file has no stage for a block that embeds token ids: it is read as on that of the next one.
        yield "stages", f"{text(map(len, split_blocks(num_blocks, of.pipeline_degree, of.split, costs)))} blocks"

    read = from_galvatron(file, plan.world_size, num_blocks, unlisted).plan
    for (what, meant), (_, made) in zip(facts(plan), facts(read), strict=True):
        if meant != made:
            raise StrategyError(f"Galvatron's file cannot express {what} as {meant}: use {made}")
    return file
