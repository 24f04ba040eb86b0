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
import re
from dataclasses import replace

from vitpar.limits import MAX_BATCH_SIZE, MAX_BLOCKS, MAX_RANKS
from vitpar.strategy.batch import batch_arithmetic
from vitpar.strategy.json_file import Fits, Keys
from vitpar.strategy.plan import Plan
from vitpar.strategy.words import either

_NUMBERS = re.compile(r" *[0-9]{1,9} *(, *[0-9]{1,9} *)*")
OUTSIDE_SHARDED = ("embed_sdp", "vocab_sdp")
SCHEDULE_NAMES = {"gpipe": "gpipe", "pipedream_flush": "1f1b"}


def _count(most: int) -> tuple[Fits, str]:
    return lambda value: type(value) is int and 1 <= value <= most, f"a whole number from 1 to {most:,}"


def _is_list(value: object) -> bool:
    return isinstance(value, str) and value.count(",") < MAX_BLOCKS and _NUMBERS.fullmatch(value) is not None


def _one_of(*values: int | str) -> tuple[Fits, str]:
    return lambda value: type(value) in (int, str) and value in values, either(map(json.dumps, values))


_DEGREE, _IMAGES = _count(MAX_RANKS), _count(MAX_BATCH_SIZE)
OF_BLOCKS: dict[str, tuple[int, tuple[int, ...], str]] = {  # value where absent, values that are read, why no others
    "tp_sizes_enc": (1, (), ""),
    "tp_consecutive_flags": (1, (0, 1), ""),
    "dp_types_enc": (0, (0, 1), ""),
    "use_sp": (0, (0, 1), ""),
    "checkpoint": (0, (0, 1), ", and vitpar recomputes whole blocks"),
    "cp_sizes_enc": (1, (1,), ", and vitpar has no context parallelism"),
    "ep_sizes_enc": (1, (1,), ", and vitpar has no expert parallelism"),
    "tp_of_ep_sizes_enc": (1, (1,), ", and vitpar has no expert parallelism"),
}
REQUIRED = ("pp_deg", "tp_sizes_enc", "tp_consecutive_flags", "dp_types_enc", "global_bsz", "chunks")
KEYS: Keys = {
    "pp_deg": _DEGREE,
    **dict.fromkeys(
        OF_BLOCKS, (_is_list, f'at most {MAX_BLOCKS:,} whole numbers as text, one per block, as in "2,2,4"')
    ),
    "global_bsz": _IMAGES,
    "chunks": (lambda value: _IMAGES[0](value) or _one_of(-1)[0](value), f"{_IMAGES[1]}, or -1"),
    "pp_division": (_is_list, f'at most {MAX_BLOCKS:,} whole numbers as text, one per stage, as in "6,6"'),
    "pipeline_type": _one_of(*SCHEDULE_NAMES),
    "default_dp_type": _one_of("ddp", "zero2", "zero3"),
    "vtp": _DEGREE,
    "vsp": _one_of(0, 1),
    "embed_sdp": _one_of(0, 1),
    "vocab_sdp": _one_of(0, 1),
    "vcp": (_one_of(1)[0], "1, as vitpar has no context parallelism"),
}


def is_galvatron(data: object) -> bool:
    """Whether JSON `data` is a strategy of Galvatron's rather than a plan of vitpar's."""
    return isinstance(data, dict) and "tp_sizes_enc" in data


def check_batch(plan: Plan, batch_size: int) -> None:
    """Refuse a batch that does not divide, and nothing that a schedule asks, which is the matter of `validate`."""
    batch_arithmetic(replace(plan, schedule="gpipe"), batch_size)
