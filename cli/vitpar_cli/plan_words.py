"""Texts that describe a plan, shared by `vitpar plan`, the header of `vitpar train` and `vitpar bench`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vitpar.strategy import Plan


def batch_words(batch: Mapping[str, int], sample: str) -> str:
    """Return text such as `256 images = 2 data-parallel parts x 128, each 4 micro-batches x 32`.

    Divisions by 1 are left out. batch: fields of ``vitpar.strategy.BatchArithmetic``.
    sample: word for a sample (``ModelConfig.sample``).
    """
    words = f"{batch['global_batch']:,} {sample}s"
    if batch["data_parallel"] > 1:
        words += f" = {batch['data_parallel']} data-parallel parts x {batch['local_batch']:,}"
    if batch["microbatches"] > 1:
        divided = ", each" if batch["data_parallel"] > 1 else " ="
        words += f"{divided} {batch['microbatches']} micro-batches x {batch['microbatch_size']:,}"
    return words


def pipeline_words(plan: Plan, idle_share: float) -> str:
    """Return text such as `1f1b, in theory 20.0 % of the time idle`."""
    return f"{plan.schedule}, in theory {percent(idle_share)} of the time idle"


def travel_words(shares: Sequence[float]) -> str:
    """Return text such as `a rank sends 25.0 % of each`.

    shares: fraction of an activation that a rank sends to the next stage, for each stage but the last.
    """
    least, most = percent(min(shares)), percent(max(shares))
    return f"a rank sends {least if least == most else f'{least} to {most}'} of each"


def redistribution_words(change: Mapping[str, Any]) -> str:
    """Return text such as `fsdp4 -> tp4: a rank receives up to 75.0 % of each activation, nothing of gradients`."""
    shares = {"activation": change["forward"], "gradient": change["backward"]}
    some = [f"{percent(share)} of each {what}" for what, share in shares.items() if share]
    none = "".join(f", nothing of {what}s" for what, share in shares.items() if not share)
    words = (
        f"a rank receives up to {', '.join(some)}{none}" if some else "no communication, ranks already have their parts"
    )
    return f"{change['source']} -> {change['target']}: {words}"


def millions(number: int) -> str:
    """Return a number in millions, such as `0.90 M` or `86.6 M`."""
    return f"{number / 1e6:,.{2 if number < 10e6 else 1}f} M"


def percent(share: float) -> str:
    """Return a fraction as a percentage: 0.912 becomes `91.2 %`."""
    return f"{share * 100:.1f} %"
