"""Sentences about a plan and its numbers, which `vitpar plan` and the header of `vitpar train` share."""

from collections.abc import Sequence

from vitpar.strategy import BatchArithmetic, Plan


def batch_words(batch: BatchArithmetic) -> str:
    """`256 images = 2 data-parallel parts x 128, each 4 micro-batches x 32`, without the divisions by 1."""
    words = f"{batch.global_batch:,} images"
    if batch.data_parallel > 1:
        words += f" = {batch.data_parallel} data-parallel parts x {batch.local_batch:,}"
    if batch.microbatches > 1:
        divided = ", each" if batch.data_parallel > 1 else " ="
        words += f"{divided} {batch.microbatches} micro-batches x {batch.microbatch_size:,}"
    return words


def pipeline_words(plan: Plan, idle_share: float) -> str:
    """`1f1b, in theory 20.0 % of the time idle`."""
    return f"{plan.schedule}, in theory {percent(idle_share)} of the time idle"


def layer_words(stages: Sequence[Sequence[str]]) -> str:
    """`stem, blocks 0-1, 4-5`. stages: for each stage in order, the names of its consecutive layers."""
    names = [name for layers in stages for name in layers]
    runs = []
    for layers in stages:
        blocks = [name.removeprefix("blocks.") for name in layers if name.startswith("blocks.")]
        runs.append(blocks[0] if len(blocks) == 1 else f"{blocks[0]}-{blocks[-1]}")
    noun = "blocks" if len(names) - ("stem" in names) - ("head" in names) > 1 else "block"
    ends = (["stem"] if "stem" in names else [], ["head"] if "head" in names else [])
    return ", ".join([*ends[0], f"{noun} {', '.join(runs)}", *ends[1]])


def millions(number: int) -> str:
    """`0.90 M`, `86.6 M`."""
    return f"{number / 1e6:,.{2 if number < 10e6 else 1}f} M"


def percent(share: float) -> str:
    """`91.2 %` of 0.912."""
    return f"{share * 100:.1f} %"
