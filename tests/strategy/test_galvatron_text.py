"""Galvatron's strategy files of BERT, T5 and Swin. A T5's file has values for its encoder, then for its decoder."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from helpers.galvatron_files import BERT_LARGE, T5_3B, T5_LARGE, column
from helpers.sentences import says
from vitpar.errors import StrategyError
from vitpar.models import model_config
from vitpar.strategy import Plan, parse, validate
from vitpar.strategy.galvatron import from_galvatron, to_galvatron, unlisted_blocks
from vitpar_cli.main import app


def imported(file: dict[str, Any], model: str, ranks: int = 8, **fields: int) -> Plan:
    """Return the plan of a file for `model`, after the checks of the runtime."""
    config = model_config(model, **fields)
    read = from_galvatron(file, ranks, config.num_blocks, unlisted_blocks(config.layers.values()))
    return validate(read.plan, config, read.batch_size)


def exported(plan: Plan, model: str, batch_size: int, **fields: int) -> dict[str, object]:
    config = model_config(model, **fields)
    return to_galvatron(plan, config.num_blocks, batch_size, unlisted=unlisted_blocks(config.layers.values()))


@pytest.mark.parametrize(
    ("file", "model", "text", "split"),
    [
        (BERT_LARGE | {"chunks": 4}, "bert_large", "dp4xtp2+zero2", "even"),
        (T5_LARGE, "t5_large", "pp2: embed=dp4, 0-11=dp2xtp2, 12-36=dp4, 37-48=fsdp4, head=dp4", (27, 22)),
        (
            T5_3B,
            "t5_3b",
            "pp1: embed=dp8+zero2, 0-21=fsdp8+ckpt, 22-23=dp8+zero2+ckpt, 24=dp8+zero2, 25-29=dp8+zero2+ckpt, "
            "30-48=fsdp8+ckpt, head=dp8+zero2",
            "even",
        ),
    ],
)
def test_published_files_survive_a_round_trip(
    file: dict[str, Any], model: str, text: str, split: str | tuple[int, ...]
) -> None:
    """Block 24 of the T5s embeds the decoder's ids, with the strategy of embed and head, whose matrix it shares."""
    plan = imported(file, model)
    assert (plan.layers, plan.split, plan.microbatches) == (parse(text).layers, split, file["chunks"])
    written = exported(plan, model, file["global_bsz"])
    assert {key: written[key] for key in file} == file


def test_shipped_micro_batches_of_unequal_sizes_are_refused() -> None:
    """Galvatron runs 11, 11 and 10 of the 32 samples."""
    with pytest.raises(StrategyError, match=r"^3 micro-batches cannot split the 32 .* evenly: use 1, 2 or 4$"):
        imported(BERT_LARGE, "bert_large")


@pytest.mark.parametrize(
    ("division", "split"),
    [
        ("2,4", (2, 5)),  # the encoder ends with the first stage: its next block goes to the second
        ("4,2", (5, 2)),
        ("1,5", (1, 6)),
        ("3,3", "even"),
        ("2,2,2", (2, 3, 2)),
        ("1,1,4", (1, 1, 5)),
    ],
)
def test_decoder_embedding_is_on_the_stage_of_the_first_decoder_block(
    division: str, split: str | tuple[int, ...]
) -> None:
    stages = division.count(",") + 1
    ones = column((1, 6))
    file = {"pp_deg": stages, "tp_sizes_enc": ones, "tp_consecutive_flags": ones, "dp_types_enc": column((0, 6))}
    file |= {"global_bsz": 8, "chunks": 4, "pp_division": division}
    fields = {"depth": 2, "decoder_depth": 4}
    plan = imported(file, "t5_small", 2 * stages, **fields)
    assert plan.split == split and plan.is_uniform
    assert exported(plan, "t5_small", 8, **fields)["pp_division"] == division


@pytest.mark.parametrize(
    ("text", "fields", "message"),
    [
        ("pp1: 24=fsdp8, *=dp8", {}, "Galvatron's file cannot express block 24 as fsdp8: use dp8"),
        ("pp1: embed=dp8, head=dp8, *=dp8+ckpt", {}, "Galvatron's file cannot express block 24 as dp8+ckpt: use dp8"),
        ("pp2xdp4", {"split": (25, 24)}, "Galvatron's file cannot express stages as 25,24 blocks: use 24,25 blocks"),
    ],
)
def test_export_refuses_what_a_file_of_a_t5_cannot_express(text: str, fields: dict[str, Any], message: str) -> None:
    with says(message):
        exported(replace(parse(text), microbatches=2, **fields), "t5_large", 16)


def test_commands_count_the_layers_of_a_t5(tmp_path: Path) -> None:
    paths = [str(tmp_path / name) for name in ("galvatron.json", "plan.json", "back.json")]
    Path(paths[0]).write_text(json.dumps(T5_LARGE))
    words = ["galvatron", "import", paths[0], "--world-size", "8", "--model", "t5_small"]
    refused = CliRunner().invoke(app, words)
    assert "has 48 blocks but the model 12" in str(refused.exception)
    said = CliRunner().invoke(app, [*words, "--set", "model.depth=24", "--out", paths[1]])
    assert said.exit_code == 0 and "49 blocks, batch 8" in said.stdout, said.output
    words = ["galvatron", "export", paths[1], "--model", "t5_large", "--batch-size", "8", "--out", paths[2]]
    assert CliRunner().invoke(app, words).exit_code == 0
    assert json.loads(Path(paths[2]).read_text()).items() >= T5_LARGE.items()
    refused = CliRunner().invoke(app, [*words[:1], "import", paths[0], "--world-size", "8", "--set", "model.depth=24"])
    assert "--set is given without --model: name the model" in str(refused.exception)


NANO = "swin_nano_patch2_window4_32"


def columns(**values: str) -> dict[str, object]:
    plain = {"tp_consecutive_flags": "1,1,1,1,1,1", "use_sp": "0,0,0,0,0,0"}
    ends = {"pipeline_type": "pipedream_flush", "default_dp_type": "zero2", "vtp": 1, "vsp": 0}
    return {"pp_deg": 2, "global_bsz": 16, "chunks": 4, "pp_division": "2,4", **plain, **values, **ends}


def test_file_of_a_swin_survives_a_round_trip() -> None:
    file = columns(tp_sizes_enc="1,1,1,1,2,2", dp_types_enc="0,0,1,1,0,0", checkpoint="1,1,0,0,0,0")
    config = model_config(NANO)
    read = from_galvatron(file, 4, config.num_blocks)
    plan = validate(read.plan, config, read.batch_size)
    expected = parse("pp2: embed=dp2+zero2, 0-1=dp2+zero2+ckpt, 2-3=fsdp2, 4-5=tp2, head=dp2+zero2")
    assert plan.layers == expected.layers
    assert plan.split == (2, 4) and plan.microbatches == 4
    written = to_galvatron(plan, config.num_blocks, read.batch_size)
    assert {key: written[key] for key in file} == file


@pytest.mark.parametrize("last, noted", [("2", True), ("1", False)])
def test_import_says_what_galvatron_does_between_stages(tmp_path: Path, last: str, noted: bool) -> None:
    """A plan with one strategy gives that to the layers that merge patches in both programs."""
    tp = f"1,1,1,1,{last},{last}"
    file = columns(tp_sizes_enc=tp, dp_types_enc="0,0,0,0,0,0", checkpoint="0,0,0,0,0,0")
    (tmp_path / "plan.json").write_text(json.dumps(file))
    words = ["galvatron", "import", str(tmp_path / "plan.json"), "--world-size", "4", "--model", NANO, "--json"]
    said = CliRunner().invoke(app, words)
    assert said.exit_code == 0, said.output
    notes = " ".join(json.loads(said.stdout)["notes"])
    assert "does not say the precision" in notes and ("the strategy of embed in Galvatron" in notes) == noted
