"""Sentences about a plan and its numbers, which `vitpar plan` and the header of `vitpar train` share."""

from collections.abc import Sequence

from vitpar.strategy import BatchArithmetic


def batch_words(batch: BatchArithmetic) -> str:
    """`256 images = 2 data-parallel parts x 128, each 4 micro-batches x 32`, without the divisions by 1."""
    words = f"{batch.global_batch:,} images"
    if batch.data_parallel > 1:
        words += f" = {batch.data_parallel} data-parallel parts x {batch.local_batch:,}"
    if batch.microbatches > 1:
        divided = ", each" if batch.data_parallel > 1 else " ="
        words += f"{divided} {batch.microbatches} micro-batches x {batch.microbatch_size:,}"
    return words


def layer_words(names: Sequence[str]) -> str:
    """`stem, blocks 0-3`. names: consecutive layers of a model."""
    blocks = [int(name.removeprefix("blocks.")) for name in names if name.startswith("blocks.")]
    words = [name for name in names if name == "stem"]
    if blocks:
        words.append(f"block {blocks[0]}" if len(blocks) == 1 else f"blocks {blocks[0]}-{blocks[-1]}")
    return ", ".join(words + [name for name in names if name == "head"])


def millions(number: int) -> str:
    """`0.90 M`, `86.6 M`."""
    return f"{number / 1e6:,.{2 if number < 10e6 else 1}f} M"
