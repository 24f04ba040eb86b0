"""`vitpar plan`, and the rank grid that it draws."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from vitpar.errors import RecipeError, StrategyError
from vitpar.strategy import parse, read_plan
from vitpar_cli.plan import plan
from vitpar_cli.plan_words import batch_words, layer_words
from vitpar_cli.rank_grid import draw_ranks

Run = Callable[..., str]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """What `vitpar plan` prints, on a console of 100 columns; raises what it raises."""
    monkeypatch.setenv("COLUMNS", "100")
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(plan)

    def invoke(*arguments: str) -> str:
        result = CliRunner().invoke(app, arguments)
        if result.exception and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result.stdout

    return invoke


BASE = ("--model", "vit_base_patch16_224", "--batch-size", "256")


def test_it_shows_ranks_stages_batch_and_communication(run: Run) -> None:
    shown = run("pp2xtp2xdp2", *BASE)
    assert "vit_base_patch16_224 under pp2xtp2xdp2\n86.6 M parameters, 1,000 classes, 8 ranks" in shown
    assert str(draw_ranks(parse("pp2xtp2xdp2"), 100)) in shown
    lines = [" ".join(line.split()) for line in shown.splitlines()]
    assert "stage 0 stem, blocks 0-5 50.3 % 22.0 M 352.3 MB" in lines
    assert "stage 1 blocks 6-11, head 49.7 % 21.7 M 346.6 MB" in lines
    assert "batch 256 images = 2 data-parallel parts x 128, each 4 micro-batches x 32" in lines
    assert "pipeline 1f1b, in theory 20.0 % of the time idle" in lines
    assert any(line.startswith("tp2 all-reduce activations") for line in lines)
    assert any(line.startswith("dp2 all-reduce gradients") for line in lines)


def test_a_recipe_keeps_its_options_under_another_name(run: Run, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('[model]\nwidth = 96\npool = "avg"\n[data]\npath = "x"\n[train]\nsteps = 1\n')
    found = json.loads(run("dp1", *BASE, "--recipe", str(recipe), "--num-classes", "10", "--json"))
    assert found["parameters"] == 85_806_346 - 2 * 768  # timm's, without the class token and its position


def test_json_has_the_same_numbers(run: Run) -> None:
    found = json.loads(run("pp2xtp2xdp2", *BASE, "--num-classes", "10", "--json"))
    assert (found["world_size"], found["num_classes"], found["idle_share"]) == (8, 10, 0.2)
    assert found["batch"] == {
        **{"global_batch": 256, "data_parallel": 2, "local_batch": 128, "microbatches": 4, "microbatch_size": 32}
    }
    assert [part["state_bytes"] for part in found["pipeline"]] == [16 * p["parameters"] for p in found["pipeline"]]
    assert found["ranks"][6] == {"pp": 1, "dp": 0, "fsdp": 0, "tp": 1}


def test_memory_follows_the_recipe(run: Run) -> None:
    sgd = ("--set", "optimizer.name=sgd", "--set", "optimizer.momentum=0.0", "--precision", "fp64")
    found = json.loads(run("dp1", *BASE, *sgd, "--set", "train.ema_decay=0.9", "--json"))
    assert found["pipeline"][0]["state_bytes"] == 8 * 3 * found["parameters"]


def test_the_options_make_the_plan_that_is_written(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    options = ("--schedule", "interleaved1f1b", "--virtual-stages", "2", "--microbatches", "8", "--split", "2,3,3,4")
    assert f"plan written to {out}" in run("pp2xdp", *BASE, "--world-size", "8", *options, "--out", str(out))
    written = read_plan(out)
    assert (str(written), written.schedule, written.virtual_stages) == ("pp2xdp4", "interleaved1f1b", 2)
    assert (written.microbatches, written.split) == (8, (2, 3, 3, 4))


def test_without_a_strategy_it_is_the_recipes(run: Run, tmp_path: Path) -> None:
    recipe = tmp_path / "small.toml"
    recipe.write_text(
        'model = { name = "vit_small_patch16_224" }\ndata = { path = "none" }\ntrain = { steps = 1 }\n'
        'parallel = { mesh = "tp3xdp2" }\n'
    )
    assert "vit_small_patch16_224 under tp3xdp2" in run("--recipe", str(recipe))


@pytest.mark.parametrize(
    ("arguments", "error", "sentence"),
    [
        (("tp2xdp",), StrategyError, "the degree of 'dp' in 'tp2xdp' is open: give it a number, or --world-size N"),
        (("tp5",), StrategyError, "tp5 does not divide the 12 heads of vit_base_patch16_224"),
        (("dp2", "--world-size", "8"), StrategyError, "'dp2' needs 2 ranks but the world has 8"),
        (("dp2", "--recipe", "no.toml"), RecipeError, "there is no recipe 'no.toml'"),
    ],
)
def test_what_is_wrong_is_refused(run: Run, arguments: tuple[str, ...], error: type[Exception], sentence: str) -> None:
    with pytest.raises(error, match=sentence):
        run(*arguments, *BASE)


def test_the_grid_puts_stages_in_rows_and_tp_ranks_in_a_box() -> None:
    assert str(draw_ranks(parse("pp2xtp2xdp2"), 80)).splitlines() == [
        "             dp 0         dp 1",
        "          tp 0  tp 1   tp 0  tp 1",
        "        ┌────────────┬────────────┐",
        "stage 0 │  0     2   │  1     3   │",
        "        ├────────────┼────────────┤",
        "stage 1 │  4     6   │  5     7   │",
        "        └────────────┴────────────┘",
    ]


def test_a_grid_that_is_too_wide_puts_data_parallel_parts_below_each_other() -> None:
    assert str(draw_ranks(parse("dp4xtp2"), 30)).splitlines()[:4] == [
        "       tp 0  tp 1",
        "     ┌────────────┐",
        "dp 0 │  0     1   │",
        "dp 1 │  2     3   │",
    ]


@pytest.mark.parametrize("strategy", ["dp8", "pp8", "tp8", "pp2xdp2xfsdp2xtp2", "pp4xtp4xdp4", "fsdp64", "pp2xdp64"])
@pytest.mark.parametrize("width", [40, 80, 120])
def test_the_grid_keeps_to_its_width(strategy: str, width: int) -> None:
    lines = str(draw_ranks(parse(strategy), width)).splitlines()
    assert max(map(len, lines)) <= width


def test_many_ranks_are_summed_up_by_axis() -> None:
    assert str(draw_ranks(parse("dp64xtp2"), 40)).splitlines() == [
        "dp:   0 2 … 126 | 1 3 … 127",
        "tp:   0 1 | 2 3 | 4 5 | 6 7 | 8 9 | …",
    ]


def test_words() -> None:
    assert layer_words([("stem", "blocks.0", "blocks.1"), ("blocks.4", "head")]) == "stem, blocks 0-1, 4, head"
    assert layer_words([("blocks.3",)]) == "block 3"


def test_batch_words_leave_out_divisions_by_one() -> None:
    from vitpar.strategy import batch_arithmetic

    assert batch_words(batch_arithmetic(parse("dp1"), 8)) == "8 images"
    assert batch_words(batch_arithmetic(parse("pp2"), 8)) == "8 images = 4 micro-batches x 2"
    assert batch_words(batch_arithmetic(parse("dp2"), 8)) == "8 images = 2 data-parallel parts x 4"
