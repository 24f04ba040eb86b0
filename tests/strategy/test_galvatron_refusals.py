"""Refused Galvatron strategy files; the error names the block or the key."""

from dataclasses import replace
from typing import Any

import pytest

from helpers.galvatron_files import HUGE, SMALL
from helpers.sentences import says
from vitpar.errors import StrategyError
from vitpar.strategy import parse
from vitpar.strategy.galvatron import from_galvatron, to_galvatron

WRONG = "vitpar cannot run the Galvatron plan:"
WRONG_VALUES = [
    *(("pp_deg", 0), ("pp_deg", 65_537), ("chunks", -1.5), ("vcp", 2), ("pipeline_type", "1f1b")),
    *(("tp_sizes_enc", value) for value in ("", "2,2,,2", "2,-1,2,2", "1," * 1024)),
    *(("tp_consecutive_flags", "1,1,2,1"), ("dp_types_enc", "0,0,0,3"), ("pp_division", "4,0")),
    *(("cp_sizes_enc", "1,1,2,1"), ("ep_sizes_enc", "8,1,1,1"), ("tp_of_ep_sizes_enc", "2")),
]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        # keys and types
        ({"embed_sdp": 0, "vocab_sdp": 1}, f"{WRONG} unknown key 'vocab_sdp': correct it"),
        *(({key: value}, rf"{WRONG} {key}(\.[0-9]+)?: Input should be .*: correct it") for key, value in WRONG_VALUES),
        ({"global_bsz": 10**9}, "the batch size is 1000000000: use 1 to 16,777,216"),
        ({"chunks": 0}, "microbatches is 0: use 1 to 16,777,216"),
        # values per block
        ({"use_sp": "0,0,0"}, "use_sp has 3 and tp_sizes_enc 4 values: give one for each block"),
        ({"use_sp": "0,0,0,1"}, "block 3: vitpar has no Ulysses sequence parallelism: set use_sp or vsp to 0"),
        ({"vsp": 1}, r"embed and head \(vtp, vsp\): vitpar has no Ulysses .*: set use_sp or vsp to 0"),
        ({"tp_sizes_enc": "2,3,2,2"}, "block 1: tp 3 does not divide the 4 ranks of a stage: use 1, 2 or 4"),
        ({"tp_sizes_enc": "2,2,8,2"}, "block 2: tp 8 does not divide the 4 ranks of a stage: use 1, 2 or 4"),
        ({"vtp": 8}, r"embed and head \(vtp, vsp\): tp 8 does not divide the 4 ranks of a stage: use 1, 2 or 4"),
        # the plan as a whole
        ({"pp_deg": 3}, "pp_deg 3 does not divide 8 ranks: use 1, 2 or 4"),
        ({"pp_deg": 8, "tp_sizes_enc": "1,1,1,1", "vtp": 1}, "4 blocks cannot fill 8 stages: use at most 4 stages"),
        ({"pp_division": "3,2"}, "split 3,2 has 5 blocks but the model has 4: give 2 numbers with sum 4"),
        ({"chunks": 3}, r"3 micro-batches cannot split the 8 samples of a data-parallel part .* evenly: use 1, 2 or 4"),
    ],
)
def test_import_refuses_invalid_files(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(StrategyError, match=f"^{message}$"):
        from_galvatron(SMALL | changes, 8)


def test_import_requires_every_key() -> None:
    with pytest.raises(StrategyError, match=f"^{WRONG} chunks: Field required: correct it$"):
        from_galvatron({name: value for name, value in HUGE.items() if name != "chunks"}, 4)


def test_import_refuses_files_of_another_model() -> None:
    with pytest.raises(StrategyError, match=r"^the file has 4 blocks but the model 12: use a file made for it$"):
        from_galvatron(SMALL, 8, num_blocks=12)


CANNOT = "Galvatron's file cannot express"


@pytest.mark.parametrize(
    ("text", "fields", "message"),
    [
        ("pp", {}, "the degree of 'pp' is open: …"),
        ("pp1: 1=dp, *=dp2", {}, "the degree of 'dp' is open: …"),
        ("dp2xpp2", {}, f"{CANNOT} pp as an inner axis: use the outermost axis"),
        ("pp2", {"schedule": "zbvzerobubble"}, f"{CANNOT} the schedule as zbvzerobubble: use 1f1b"),
        ("pp1: 0-7=dp2", {}, "blocks 0-7 are given a strategy but the model has 4 blocks, 0 to 3: change the group"),
        ("pp1: 2=tp4+2d, *=dp4", {}, f"{CANNOT} block 2 as tp4+2d: use tp4"),
        ("pp1: 2=tp8+2.5d@2, *=dp8", {}, f"{CANNOT} block 2 as tp8+2.5d@2: use tp8"),
        ("pp1: 2=tp8+3d+ckpt, *=dp8", {}, f"{CANNOT} block 2 as tp8+3d+ckpt: use tp8+ckpt"),
        ("pp1: 1=tp4+sp, *=dp4", {}, f"{CANNOT} block 1 as tp4+sp: use tp4"),
        ("pp1: 3=fsdp2xdp2, *=dp4", {}, f"{CANNOT} block 3 as fsdp2xdp2: use fsdp4"),
        ("pp1: 3=dp4+zero1, *=dp4", {}, f"{CANNOT} block 3 as dp4+zero1: use dp4"),
        ("pp1: 0=fsdp4+offload, *=dp4", {}, f"{CANNOT} block 0 as fsdp4+offload: use fsdp4"),
        ("pp1: 0=dp4+ckpt.selective, *=dp4", {}, f"{CANNOT} block 0 as dp4+ckpt.selective: use dp4+ckpt"),
        ("dp4+ckpt", {}, f"{CANNOT} embed as dp4+ckpt: use dp4"),
        ("pp1: embed=dp4, *=dp4+ckpt", {}, f"{CANNOT} head as dp4+ckpt: use dp4"),
        ("tp2xdp2", {}, f"{CANNOT} embed as tp2xdp2: use dp2xtp2"),
        ("pp1: embed=dp4, *=fsdp4", {}, f"{CANNOT} head as fsdp4: use dp4"),
        ("pp1: 1=dp4+zero2, 2=dp2xtp2+zero2, *=dp4", {}, f"{CANNOT} embed as dp4: use dp4+zero2"),
        ("dp4", {"microbatches": 5}, "5 micro-batches cannot split the 4 samples of a data-parallel…: use 1, 2 or 4"),
    ],
)
def test_export_refuses_plans_galvatron_cannot_express(text: str, fields: dict[str, Any], message: str) -> None:
    with says(message):
        to_galvatron(replace(parse(text), **{"microbatches": 2} | fields), 4, 16)
