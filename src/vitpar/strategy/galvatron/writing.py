"""Writer of Galvatron's strategy files."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace

from vitpar.errors import StrategyError
from vitpar.io import PathLike
from vitpar.strategy.galvatron.reading import SCHEDULE_NAMES, from_galvatron
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

    Raises StrategyError for what the file cannot express, with what it would be read as.
    """
    if plan.pp is None or any(strategy.is_open for strategy in plan.distinct):
        raise _lost(f"an open degree of the plan ({shown(plan)})", "a number for every axis")
    if plan.microbatches is None:
        raise _lost(f"a plan ({shown(plan)}) without a number of micro-batches", "microbatches")
    if plan.pp_index:
        raise _lost(f"pp inside another axis ({shown(plan)})", str(replace(plan, pp_index=0)))
    if plan.schedule not in SCHEDULE_NAMES.values():
        raise _lost(f"schedule {plan.schedule}", either(SCHEDULE_NAMES.values()))
    names = ("embed", *(f"block {index}" for index in range(num_blocks)), "head")
    layers = plan.strategies(names)
    stages = split_blocks(num_blocks, plan.pipeline_degree, plan.split, costs)
    blocks = [layers[name] for index, name in enumerate(names[1:-1]) if index not in unlisted]

    def column(values: Iterable[int]) -> str:
        return ",".join(map(str, values))

    file: dict[str, object] = {
        "pp_deg": plan.pipeline_degree,
        "tp_sizes_enc": column(block.degree("tp") for block in blocks),
        "tp_consecutive_flags": column(int(len(block.axes) < 2 or block.axes[0].role != "tp") for block in blocks),
        "dp_types_enc": column(int(block.has("fsdp")) for block in blocks),
        "use_sp": column(0 for _ in blocks),
        "checkpoint": column(int(block.checkpoint is not None) for block in blocks),
        "global_bsz": batch_size,
        "chunks": plan.microbatches,
        "pp_division": column(len({*stage}.difference(unlisted)) for stage in stages),
        "pipeline_type": "gpipe" if plan.schedule == "gpipe" and plan.pp != 1 else "pipedream_flush",
        "default_dp_type": "zero2" if any(layer.zero == 2 for layer in layers.values()) else "ddp",
        "vtp": layers["embed"].degree("tp"),
        "vsp": 0,
        "embed_sdp": int(layers["embed"].has("fsdp")),
        "cp_sizes_enc": column(1 for _ in blocks),
        "vcp": 1,
    }
    read = from_galvatron(file, plan.world_size, num_blocks, unlisted).plan
    for name, there in read.strategies(names).items():
        if there != replace(layers[name], axes=tuple(axis for axis in layers[name].axes if axis.degree != 1)):
            raise _lost(f"{name} as {layers[name]}", f"{there}")
    meant, made = (
        ", ".join(str(len(stage)) for stage in found)
        for found in (stages, split_blocks(num_blocks, read.pipeline_degree, read.split))
    )
    if meant != made:  # a block that embeds token ids is on the stage of the next one
        raise _lost(f"stages of {meant} blocks", made)
    return file


def _lost(what: str, instead: str) -> StrategyError:
    return StrategyError(f"Galvatron's file cannot express {what}: use {instead}")


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
