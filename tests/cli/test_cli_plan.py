"""`vitpar plan`, its drawing of the ranks, and the parts of its output that other commands also print."""

import json
from collections.abc import Callable
from functools import partial
from itertools import pairwise, product
from pathlib import Path

import pytest

from helpers.command_line import printed
from helpers.small_data import CLASSES, pack_small
from vitpar.errors import UserError
from vitpar.models import model_config
from vitpar.planner.cost.price import price
from vitpar.planner.sources import estimated_costs
from vitpar.strategy import parse, validate
from vitpar.strategy.plan_json import read_plan
from vitpar_cli.plan import plan
from vitpar_cli.plan_view import draw_ranks

Run = Callable[..., str]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """Return a function that runs `vitpar plan` on a console of 100 columns and returns its output."""
    monkeypatch.setenv("COLUMNS", "100")
    return partial(printed, plan)


BASE = ("--model", "vit_base_patch16_224", "--batch-size", "256")
LAYERED = "pp2: embed=fsdp4, 0-5=tp2xfsdp2, *=fsdp4+ckpt"


def squeezed(shown: str) -> list[str]:
    """Return the lines with runs of spaces collapsed."""
    return [" ".join(line.split()) for line in shown.splitlines()]


def test_plan_shows_ranks_stages_batch_and_communication(run: Run) -> None:
    shown = run("pp2xtp2xdp2", *BASE)
    assert "vit_base_patch16_224 under pp2xtp2xdp2\n86.6 M parameters, 1,000 classes, 8 ranks" in shown
    assert str(draw_ranks(parse("pp2xtp2xdp2"), 100)) in shown
    lines = squeezed(shown)
    assert "stage 0 embed, blocks 0-5 50.3 % 22.0 M 352.3 MB" in lines
    assert "stage 1 blocks 6-11, head 49.7 % 21.7 M 346.6 MB" in lines
    assert "batch 256 images = 2 data-parallel parts x 128, each 4 micro-batches x 32" in lines
    assert "pipeline 1f1b, in theory 20.0 % of the time idle" in lines
    assert any(line.startswith("tp2 forward 2 all-reduces, backward 2 all-reduces") for line in lines)
    assert any(line.startswith("dp2 all-reduce gradients") for line in lines)
    assert [line.split()[0] for line in lines[-4:] if line] == ["pipeline", "pp2", "tp2", "dp2"]
    assert any(line.endswith("not counted: activations") for line in lines)


def test_modules_show_styles_placements_and_collectives(run: Run) -> None:
    lines = squeezed(run("pp1: 0-3=tp8+3d, *=tp4xdp2+sp", *BASE, "--modules"))
    split = "+sp split the samples of a micro-batch where Megatron splits the sequence"
    assert any(line.startswith(split) for line in lines)
    at = lines.index("modules of blocks 0-3: tp8+3d")
    assert lines[at + 5].startswith("attn.qkv Linear3D j Shard(0) j Shard(0) all-gather /")
    at = lines.index("modules of blocks 4-11: tp4xdp2+sp")
    assert "attn.proj RowLinear Shard(1) Replicate reduce-scatter /" in lines[at:]
    record = json.loads(run("tp2", *BASE, "--modules", "--json"))["modules"]
    assert [layer["layers"][0] for layer in record] == ["embed", "blocks.0", "head"]
    fc1 = next(row for row in record[1]["modules"] if row["module"] == "mlp.fc1")
    found = [fc1[key] for key in ("style", "weight", "before", "after")]
    assert found == ["ColumnLinear", "Shard(0)", "– / all-reduce", ""]
    assert "no layer has tensor parallelism" in run("dp2", *BASE, "--modules")


def test_layerwise_plan_is_shown_strategy_by_strategy(run: Run) -> None:
    shown = run(LAYERED, *BASE)
    assert str(draw_ranks(parse(LAYERED), 100)) in shown
    lines = squeezed(shown)
    # A quarter of embed and blocks, except parameters with one row (fsdp) and those that tp does not split.
    assert "stage 0 0-3 embed, blocks 0-5 50.3 % 10.9 M 175.0 MB" in lines
    assert "stage 1 4-7 blocks 6-11, head 49.7 % 10.8 M 173.2 MB" in lines
    assert "batch 256 images = 4 data-parallel parts x 64, each 4 micro-batches x 16" in lines
    assert any("a rank sends 25.0 % of each" in f"{a} {b}" for a, b in pairwise(lines))
    headings = ["embed: fsdp4", "blocks 0-5: tp2xfsdp2", "blocks 6-11, head: fsdp4+ckpt", "redistribution before"]
    places = [lines.index(heading) for heading in headings]
    assert places == sorted(places)
    names = [line.split(" ")[0] for line in lines[places[1] + 1 : places[2]]]
    assert "tp2" in names and "fsdp2" in names and "fsdp4" not in names
    assert any(line.startswith("+ckpt layers keep only their input") for line in lines[places[2] :])
    assert lines[places[3] + 1].startswith("block 0 fsdp4 -> tp2xfsdp2: a rank receives up to 50.0 % of each")
    assert lines[places[3] + 3].startswith("block 6 tp2xfsdp2 -> fsdp4+ckpt: a rank receives up to 25.0 % of each")
    assert any("gradients not yet reduced" in line for line in lines)


def test_json_output_has_the_printed_numbers(run: Run) -> None:
    sgd = ("--set", "optimizer.name=sgd", "--set", "optimizer.momentum=0.0", "--precision", "fp64")
    found = json.loads(run("pp2xtp2xdp2", *BASE, *sgd, "--set", "train.ema_decay=0.9", "--num-classes", "10", "--json"))
    assert (found["world_size"], found["num_classes"], found["idle_share"]) == (8, 10, 0.2)
    assert found["batch"] == {
        **{"global_batch": 256, "data_parallel": 2, "local_batch": 128, "microbatches": 4, "microbatch_size": 32}
    }
    # Parameters, gradients and averages of 8 bytes; SGD without momentum has no state.
    assert [part["state_bytes"] for part in found["pipeline"]] == [24 * p["parameters"] for p in found["pipeline"]]
    assert found["ranks"][6] == {"pp": 1, "stage_rank": 2} and found["pipeline_axis"]["degree"] == 2
    found = json.loads(run(LAYERED, *BASE, "--json"))
    assert found["strategy"] == LAYERED and found["ranks"][5] == {"pp": 1, "stage_rank": 1}
    strategies = {part["strategy"]: part for part in found["strategies"]}
    assert list(strategies) == ["fsdp4", "tp2xfsdp2", "fsdp4+ckpt"]
    assert strategies["fsdp4+ckpt"]["layers"] == [*(f"blocks.{i}" for i in range(6, 12)), "head"]
    assert [flag["flag"] for flag in strategies["fsdp4+ckpt"]["flags"]] == ["+ckpt"]
    assert strategies["tp2xfsdp2"]["places"] == [{"tp": tp, "fsdp": fsdp} for tp in (0, 1) for fsdp in (0, 1)]


def test_plans_come_from_options_recipes_and_files(run: Run, tmp_path: Path) -> None:
    out, recipe = tmp_path / "plan.json", tmp_path / "small.toml"
    options = ("--schedule", "interleaved1f1b", "--virtual-stages", "2", "--microbatches", "8", "--split", "2,3,3,4")
    shown = run("pp2xdp", *BASE, "--world-size", "8", *options, "--out", str(out))
    assert f"plan written to {out}" in shown and "interleaved1f1b, in theory 5.9 % of the time idle" in shown
    written = read_plan(out)
    assert (str(written), written.schedule, written.virtual_stages) == ("pp2xdp4", "interleaved1f1b", 2)
    assert (written.microbatches, written.split) == (8, (2, 3, 3, 4))
    shown = run(LAYERED, *BASE, "--out", str(out))
    assert str(read_plan(out)) == LAYERED and run(str(out), *BASE) == shown.rpartition("\nplan written")[0]
    assert "under pp2: 0-5=tp2xdp2, *=fsdp4\n" in run("pp2: 0-5=tp2xdp, *=fsdp", *BASE, "--world-size", "8")
    recipe.write_text(
        'model = { name = "vit_small_patch16_224" }\ndata = { path = "none" }\ntrain = { steps = 1 }\n'
        'parallel = { mesh = "tp3xdp2" }\n'
    )
    assert "vit_small_patch16_224 under tp3xdp2" in run("--recipe", str(recipe))
    thousand = ("--model", "vit_large_patch16_224", "--batch-size", "1024")
    assert "1,024 ranks" in run("pp1: 0-3=fsdp1024, 4-7=tp2xfsdp512, *=dp64xtp16+2d", *thousand)


H100 = ("--model", "vit_small_patch16_224", "--batch-size", "256", "--cluster", "8xH100")


def test_plan_is_predicted_for_a_cluster(run: Run) -> None:
    config = model_config("vit_small_patch16_224", num_classes=1000)
    predicted = json.loads(run("tp2xdp", *H100, "--memory", "20GB", "--json"))["predicted"]
    costs = estimated_costs(config, "8xH100")
    expected = price(validate(parse("tp2xdp4"), config, 256), costs, 256)
    assert predicted["strategy"] == "tp2xdp4" and predicted["fits"] and predicted["precision"] == "bf16"
    assert predicted["step_seconds"] == pytest.approx(expected.seconds)
    assert predicted["memory_bytes"] == pytest.approx(expected.memory_bytes)
    training = predicted["training"]
    assert (training["epochs"], training["samples"]) == (300, 1_281_167) and "are assumed" in training["assumed"]
    assert training["device_hours"] == pytest.approx(8 * training["steps"] * predicted["step_seconds"] / 3600)
    helpful = {change["change"]: change for change in predicted["what_would_help"]}
    assert helpful["links twice as fast"]["strategy"] == predicted["strategy"]
    assert helpful["links twice as fast"]["time_per_image"] < 0
    shown = run("fsdp4+ckpt", *H100, "--memory", "100MB", "--microbatches", "64")  # four of the eight devices
    assert "on 4 ranks of NVIDIA H100" in shown and "MFU" in shown
    assert "fits       no" in shown and "too much; use more GPUs with fsdp or +offload\n" in shown


INVALID: list[tuple[tuple[str, ...], str]] = [
    (("tp2xdp", *BASE), "the degree of 'dp' in 'tp2xdp' is open: give it a number, or --world-size"),
    (("pp: 0-11=tp2, *=dp2", *BASE), "the degree of 'pp' in 'pp: 0-11=tp2, \\*=dp2' is open"),
    (("pp2: 0-5=tp2, *=dp", *BASE), "the degree of 'dp' in 'pp2: 0-5=tp2, \\*=dp' is open: give it"),
    (("dp2", "--world-size", "8", *BASE), "'dp2' needs 2 ranks but the world has 8"),
    (("dp2", "--memory", "4GB"), "--memory is given without a machine"),
    (("dp2", "--epochs", "3"), "--epochs is given without a machine"),
    (("dp16", *H100), "takes 16 ranks but 8xH100 has 8"),
    (("dp2", "--hardware", "x.json", "--num-classes", "5"), "--num-classes is given without"),
    (("dp2", *H100, "--hardware", "x.json"), "both --cluster and a profile are given"),
]


def test_invalid_plan_commands_are_refused(run: Run) -> None:
    for words, sentence in INVALID:
        with pytest.raises(UserError, match=sentence):
            run(*words)


def test_classes_are_those_of_the_recipes_data_but_not_of_a_published_model(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data_shards").mkdir()
    pack_small(tmp_path).rename(tmp_path / "data_shards" / "digits")
    monkeypatch.chdir(tmp_path)
    assert f" {CLASSES} classes" in run("dp2")
    assert f" {CLASSES} classes" in run("dp2", "--recipe", "digits")
    assert " 1,000 classes" in run("dp2", "--model", "vit_tiny_patch16_224")
    assert " 1,000 classes" in run("dp2", "--model", "vit_tiny_patch16_224", "--cluster", "2xH100")
    assert " 5 classes" in run("dp2", "--recipe", "digits", "--num-classes", "5")


DRAWN = {
    # Stages in rows, tensor-parallel ranks in a box.
    ("pp2xtp2xdp2", 80): """
             dp 0         dp 1
          tp 0  tp 1   tp 0  tp 1
        ┌────────────┬────────────┐
stage 0 │  0     2   │  1     3   │
        ├────────────┼────────────┤
stage 1 │  4     6   │  5     7   │
        └────────────┴────────────┘
""",
    ("tp12+2.5d", 40): """
        d 0        d 1        d 2
      j 0  j 1   j 0  j 1   j 0  j 1
    ┌──────────┬──────────┬──────────┐
i 0 │  0    1  │  4    5  │  8    9  │
i 1 │  2    3  │  6    7  │ 10   11  │
    └──────────┴──────────┴──────────┘
""",
    # Where that is too wide, and for many ranks: the groups along each axis.
    ("tp12+2.5d", 30): """
d:    0 4 8 | 1 5 9 | …
""",
    # One line per strategy of a layerwise plan.
    ("pp2: embed=fsdp8, 0=tp4xdp2, 1=fsdp8, 2-3=tp8+2.5d, *=tp2xdp4+sp", 80): """
ranks of a stage, counted from 0; | separates parts of the batch
embed, 1  fsdp8       0 | 1 | 2 | 3 | 4 | 5 | 6 | 7
0         tp4xdp2     0 2 4 6 | 1 3 5 7
2-3       tp8+2.5d    0 1 | 2 3 | 4 5 | 6 7
*         tp2xdp4+sp  0 4 | 1 5 | 2 6 | 3 7
""",
    ("tp4xpp2xdp32+2d", 40): """
i:    0 128 | 1 129 | 2 130 | 3 131 | …
j:    0 64 | 1 65 | 2 66 | 3 67 | …
pp:   0 32 | 1 33 | 2 34 | 3 35 | …
dp:   0 1 … 31 | 32 33 … 63 | …
""",
}


def test_ranks_are_drawn() -> None:
    for (strategy, width), picture in DRAWN.items():
        expected = picture.splitlines()[1:]
        assert str(draw_ranks(parse(strategy), width)).splitlines()[: len(expected)] == expected, strategy


WIDE = "pp2: 0=tp8xdp8, 2=tp8xdp8, 4=tp8xdp8, 6=tp8xdp8, 8=tp8xdp8, 10=tp8xdp8, 12=tp8xdp8, *=tp64+2d+ckpt.selective"


def test_grid_keeps_to_its_width() -> None:
    many = ("pp2xdp2xfsdp2xtp2", "pp2xdp64", "pp2xdp2xtp16+2d", "dp2xtp64+3d", "tp18xdp2+2.5d", WIDE)
    for strategy, width in product(many, (40, 80, 120)):
        assert max(map(len, str(draw_ranks(parse(strategy), width)).splitlines())) <= width, strategy
