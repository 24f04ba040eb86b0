"""Galvatron's strategy files of a Swin: one entry for each block, whatever its kind."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from vitpar.models import model_config
from vitpar.strategy import parse, validate
from vitpar.strategy.galvatron import from_galvatron, to_galvatron
from vitpar_cli.main import app

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
    assert any("the strategy of embed in Galvatron" in note for note in json.loads(said.stdout)["notes"]) == noted
