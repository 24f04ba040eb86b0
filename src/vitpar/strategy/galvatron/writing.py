"""Writer of Galvatron's strategy files."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from vitpar.errors import StrategyError
from vitpar.io import PathLike
from vitpar.strategy.galvatron.reading import SCHEDULE_NAMES, check_batch
from vitpar.strategy.layer import Strategy
from vitpar.strategy.plan import Plan
from vitpar.strategy.plan_json import write_text
from vitpar.strategy.stages import split_blocks
from vitpar.text import either, shown


def to_galvatron(
    plan: Plan,
    num_blocks: int,
    batch_size: int,
    costs: Sequence[float] | None = None,
    unlisted: Sequence[int] = (),
) -> dict[str, object]:
    """Return the plan as Galvatron's JSON, with all its keys for a model without experts.

    costs: costs of the layers for split "balanced", as in ``split_blocks``
    unlisted: numbers of the blocks without values in the file (``unlisted_blocks``)

    Raises StrategyError naming the layer or field that Galvatron's file cannot express.
    """
    for what, fix in _beyond_plan(plan):
        raise StrategyError(f"the plan ({shown(plan)}) has {what}, which Galvatron's file cannot express: {fix}")
    if plan.microbatches is None:
        raise StrategyError(
            f"the plan ({shown(plan)}) has no number of micro-batches, which Galvatron's file needs: give microbatches"
        )
    names = ("embed", *(f"block {index}" for index in range(num_blocks)), "head")
    layers = plan.strategies(names)
    _check_layers(layers, ("embed", *(f"block {index}" for index in unlisted), "head"))
    check_batch(plan, batch_size)
    stages = split_blocks(num_blocks, plan.pipeline_degree, plan.split, costs)
    _check_stages(stages, unlisted)
    outside, *every = list(layers.values())[:-1]
    blocks = [block for index, block in enumerate(every) if index not in unlisted]
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
        "pp_division": column(len({*stage}.difference(unlisted)) for stage in stages),
        "pipeline_type": "gpipe" if plan.schedule == "gpipe" and plan.pp != 1 else "pipedream_flush",
        "default_dp_type": "zero2" if zero else "ddp",
        "vtp": outside.degree("tp"),
        "vsp": 0,
        "embed_sdp": int(outside.has("fsdp")),
        "cp_sizes_enc": column(1 for _ in blocks),
        "vcp": 1,
    }


def write_galvatron(
    path: PathLike,
    plan: Plan,
    num_blocks: int,
    batch_size: int,
    costs: Sequence[float] | None = None,
    unlisted: Sequence[int] = (),
) -> None:
    """Write the plan in Galvatron's format to `path` atomically, one key per line.

    Raises StrategyError if the format cannot express the plan, or the file cannot be written.
    """
    write_text(path, json.dumps(to_galvatron(plan, num_blocks, batch_size, costs, unlisted), indent=2) + "\n")


def _beyond_plan(plan: Plan) -> Iterator[tuple[str, str]]:
    """Yield the settings of the plan, apart from its layers, that the file cannot express, and what to use instead."""
    if plan.pp is None:
        yield "an open degree", "give pp a number"
    if plan.pp_index:
        yield "pp inside another axis", f"use {replace(plan, pp_index=0)}"
    if plan.schedule not in SCHEDULE_NAMES.values():
        yield f"schedule {plan.schedule}", f"use {either(SCHEDULE_NAMES.values())}"
    if plan.virtual_stages > 1:
        yield f"{plan.virtual_stages} virtual stages", "set virtual_stages to 1"


def _beyond_layer(name: str, layer: Strategy, outside: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the settings of the layer that the file cannot express, and what to use instead.

    outside: names of the layers that have one strategy in the file
    """
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
    if name in outside:
        them = f"{', '.join(outside[:-1])} and {outside[-1]}"
        if layer.checkpoint:
            where = "outside the blocks" if len(outside) == 2 else "outside encoder and decoder"
            yield f"+ckpt {where}", f"use {replace(layer, checkpoint=None)} for {them}"
        if _is_strided(layer):
            yield "tp as its outer axis", f"use {replace(layer, axes=layer.axes[::-1])} for {them}"


def _check_layers(layers: dict[str, Strategy], outside: Sequence[str]) -> None:
    """Raise StrategyError if the file cannot express the strategies.

    layers: strategies by name in messages
    outside: names of the layers that have one strategy in the file, embed first
    """
    for name, layer in layers.items():
        for what, fix in _beyond_layer(name, layer, outside):
            raise StrategyError(f"{name} ({layer}) has {what}, which Galvatron's file cannot express: {fix}")
    embed = layers["embed"]
    for name in outside:
        if layers[name] != embed:
            raise StrategyError(
                f"embed is {embed} but {name} is {layers[name]}, and Galvatron's file has one strategy for both: "
                "use either in both"
            )
    replicated = {layer.zero: f"{name} is {layer}" for name, layer in reversed(layers.items()) if layer.has("dp")}
    if len(replicated) > 1:
        raise StrategyError(
            f"{replicated[0]} but {replicated[2]}, and Galvatron's file has one default_dp_type for all: "
            "use +zero2 in both or neither, or fsdp"
        )


def _check_stages(stages: Sequence[range], unlisted: Sequence[int]) -> None:
    """Raise StrategyError if a block of `unlisted` is not on the stage of the block behind it."""
    for number, stage in enumerate(stages):
        if stage[-1] in unlisted:
            raise StrategyError(
                f"stage {number} ends with block {stage[-1]}, and in Galvatron that block, which embeds token ids, is "
                "on the stage of the next one: use another split"
            )


def _is_strided(layer: Strategy) -> bool:
    """Return whether tp is the outer of two axes, so that tp ranks are not neighbours."""
    return len(layer.axes) > 1 and layer.axes[0].role == "tp"
