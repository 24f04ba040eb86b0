"""Plans of many kinds for so many ranks, on which predictions are tried."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from vitpar.errors import StrategyError
from vitpar.models.config import ViTConfig
from vitpar.strategy import Plan, parse, validate
from vitpar.strategy.support import refuse_clashes
from vitpar.strategy.words import divisors

DATA = ("dp{n}", "fsdp{n}", "dp{n}+zero1", "dp{n}+zero2", "dp{n}+ckpt", "fsdp{n}+ckpt.selective")
TENSOR = ("tp{n}", "tp{n}+sp", "tp{n}+2d", "tp{n}+3d")
TWO = ("dp{a}xfsdp{b}", "dp{a}xtp{b}", "tp{a}xdp{b}", "tp{a}xfsdp{b}", "tp{a}xdp{b}+sp")
PIPELINES = ("pp{a}xdp{b}", "pp{a}xfsdp{b}", "pp{a}xtp{b}")


def example_plans(config: ViTConfig, ranks: int, batch_size: int, precision: str, compiled: bool) -> Iterator[Plan]:
    """Those that fit the model and the batch, validated: every role alone and with others, checkpoints, layerwise
    plans, pipelines with several schedules and numbers of micro-batches."""
    splits = [(a, ranks // a) for a in divisors(ranks) if 1 < a < ranks]
    middle = config.depth // 2
    words: list[tuple[str, dict[str, Any]]] = [(text.format(n=ranks), {}) for text in (*DATA, *TENSOR)]
    words += [(f"{role}{ranks}", {"microbatches": m}) for role in ("dp", "fsdp") for m in (2, 4)]
    words += [(f"tp{ranks}", {"microbatches": 4}), (f"dp{ranks}+zero1", {"microbatches": 2})]
    words += [(text.format(a=a, b=b), {}) for a, b in splits for text in TWO]
    pipelines = [text.format(a=a, b=b) for a, b in splits for text in PIPELINES] + [f"pp{ranks}"]
    words += [(text, {"microbatches": m}) for text in pipelines for m in (4, 8)]
    words += [(f"pp{ranks}", {"microbatches": m, "schedule": "gpipe"}) for m in (4, 8)]
    words += [(pipelines[0], {"microbatches": 4, "schedule": "interleaved1f1b", "virtual_stages": 2})]
    words += [(f"pp{ranks}", {"microbatches": 8, "schedule": "zbvzerobubble", "virtual_stages": 2})]
    words += [(f"pp1: 0-{middle - 1}=dp{ranks}, *=fsdp{ranks}", {})]
    words += [(f"pp{a}: 0-{middle - 1}=dp{b}, *=tp{b}", {"microbatches": 4}) for a, b in splits[:1]]
    found: dict[Plan, None] = {}
    for text, fields in words:
        try:
            plan = validate(replace(parse(text), **fields), config, batch_size)
            refuse_clashes(plan, precision, compiled)
        except StrategyError:
            continue
        found[plan] = None
    yield from found
