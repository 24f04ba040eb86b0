"""Refused Galvatron strategy files; the error names the block or the key."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from helpers.galvatron_files import HUGE, OLD, SMALL
from helpers.sentences import says
from vitpar.errors import StrategyError
from vitpar.strategy import parse
from vitpar.strategy.galvatron import from_galvatron, read_galvatron, to_galvatron

WRONG = "the Galvatron plan is wrong:"
WRONG_VALUES = [
    *(("pp_deg", value) for value in ("2", True, 0, 65_537)),
    *(("global_bsz", value) for value in (16.0, 10**9)),
    *(("chunks", -1.0), ("vsp", False), ("embed_sdp", 2), ("vcp", 2)),
    *(("pipeline_type", "1f1b"), ("default_dp_type", "fsdp"), ("default_dp_type", ["ddp"])),
]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        # keys and types
        ({"pp_size": 2}, "'pp_size' is a key of another file format: use a file with pp_deg and tp_sizes_enc"),
        ({"use_sq": "0,0,0,0"}, f"{WRONG} unknown key 'use_sq': correct it"),
        ({"embed_sdp": 0, "vocab_sdp": 1}, "embed_sdp is 0 but its alias vocab_sdp is 1: leave out one of them"),
        *(({key: value}, f"{WRONG} {key}: Input should be .*") for key, value in WRONG_VALUES),
        ({"chunks": 0}, "chunks is 0: use the number of micro-batches of a step, or -1 for Galvatron's rule"),
        # lists of numbers as text
        *(
            ({key: value}, f'{WRONG} {key}: give whole numbers as text, as in "2,2,4": correct it')
            for key in ("tp_sizes_enc", "pp_division")
            for value in ([2, 2, 2, 2], "", "0,0,,0", "0,0,0,0,", "0,-1,0,0", "0,None,0,0", "1," * 1024 + "1")
        ),
        ({"use_sp": "0,0,0"}, "use_sp has 3 values but tp_sizes_enc 4: give one for each block"),
        ({"tp_sizes_enc": "2"}, "tp_consecutive_flags has 4 values but tp_sizes_enc 1: give one for each block"),
        # values per block
        ({"tp_consecutive_flags": "1,1,2,1"}, "block 2: tp_consecutive_flags is 2: use 0 or 1"),
        ({"dp_types_enc": "0,0,0,3"}, "block 3: dp_types_enc is 3: use 0 or 1"),
        ({"use_sp": "0,2,0,0"}, "block 1: use_sp is 2: use 0 or 1"),
        ({"checkpoint": "0,2,0,0"}, "block 1: checkpoint is 2, and vitpar recomputes whole blocks: use 0 or 1"),
        ({"cp_sizes_enc": "1,1,2,1"}, "block 2: cp_sizes_enc is 2, and vitpar has no context parallelism: use 1"),
        ({"ep_sizes_enc": "8,1,1,1"}, "block 0: ep_sizes_enc is 8, and vitpar has no expert parallelism: use 1"),
        ({"tp_of_ep_sizes_enc": "1,1,1,4"}, "block 3: tp_of_ep_sizes_enc is 4, and vitpar has no expert.*: use 1"),
        ({"use_sp": "0,0,0,1"}, "block 3: vitpar has no Ulysses sequence parallelism, here.*: set use_sp to 0 for tp2"),
        ({"vsp": 1}, r"embed and head \(vtp\): vitpar has no Ulysses .*, here over 2 ranks: set vsp to 0 for tp2"),
        ({"tp_sizes_enc": "2,3,2,2"}, "block 1: tp 3 does not divide the 4 ranks of a stage: use 1, 2 or 4"),
        ({"tp_sizes_enc": "2,2,0,2"}, "block 2: tp 0 does not divide the 4 ranks of a stage: use 1, 2 or 4"),
        ({"tp_sizes_enc": "2,2,8,2"}, "block 2: tp 8 does not divide the 4 ranks of a stage: use 1, 2 or 4"),
        ({"vtp": 8}, r"embed and head \(vtp\): tp 8 does not divide the 4 ranks of a stage: use 1, 2 or 4"),
        # the plan as a whole
        ({"pp_deg": 3}, "pp_deg 3 does not divide 8 ranks: use 1, 2 or 4"),
        ({"pp_deg": 8, "tp_sizes_enc": "1,1,1,1", "vtp": 1}, "pp_deg: 4 blocks cannot fill 8.*: use at most 4 stages"),
        ({"pp_division": "3,2"}, "pp_division: split 3,2 has 5 blocks but the model has 4: give 2 numbers with sum 4"),
        ({"chunks": 3}, r"3 micro-batches cannot split the 8 samples of a data-parallel part .* evenly: use 1, 2 or 4"),
    ],
)
def test_import_refuses_invalid_files(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(StrategyError, match=f"^{message}$"):
        from_galvatron(SMALL | changes, 8)


@pytest.mark.parametrize(
    "key", ["pp_deg", "tp_sizes_enc", "tp_consecutive_flags", "dp_types_enc", "global_bsz", "chunks"]
)
def test_import_requires_every_key(key: str) -> None:
    with pytest.raises(StrategyError, match=f"^{WRONG} {key}: Field required: correct it$"):
        from_galvatron({name: value for name, value in HUGE.items() if name != key}, 4)


def test_import_refuses_contradictions_with_the_model() -> None:
    with pytest.raises(StrategyError, match=r"^chunks is -1, which depends on the .* older file: set a number$"):
        from_galvatron(OLD | {"chunks": -1}, 16)
    with pytest.raises(StrategyError, match=r"^tp_sizes_enc has 4 blocks but the model 12: use a file made for it$"):
        from_galvatron(SMALL, 8, num_blocks=12)


CANNOT = "Galvatron's file cannot express"


@pytest.mark.parametrize(
    ("text", "fields", "message"),
    [
        ("pp", {}, f"{CANNOT} an open degree of the plan (pp): use a number for every axis"),
        ("pp1: 1=dp, *=dp2", {}, f"{CANNOT} an open degree of the plan …: use a number for every axis"),
        ("dp2xpp2", {}, f"{CANNOT} pp inside another axis (dp2xpp2): use pp2xdp2"),
        ("pp2", {"schedule": "zbvzerobubble"}, f"{CANNOT} schedule zbvzerobubble: use gpipe or 1f1b"),
        ("pp2", {"microbatches": None}, f"{CANNOT} a plan (pp2) without a number of micro-batches: use microbatches"),
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


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (json.dumps(SMALL | {"pp_deg": 3}), "{path}: pp_deg 3 does not divide 8 ranks: use 1, 2 or 4"),
        ("[]", "{path} is not a plan: it has no JSON object"),
        ('{"pp_deg": ', "{path} is not JSON: Expecting value: line 1 column 12 (char 11)"),
        (None, "cannot read the plan {path}: No such file or directory"),
    ],
)
def test_refused_file_is_named(tmp_path: Path, content: str | None, message: str) -> None:
    path = tmp_path / "plan.json"
    if content is not None:
        path.write_text(content)
    with says(message.format(path=path)):
        read_galvatron(path, 8)
