"""`parallel.fallback_meshes`: the plan a recipe uses when its own mesh does not fit the world."""

from pathlib import Path
from typing import Any

import pytest

from helpers.command_line import refusal
from vitpar.errors import RecipeError, StrategyError
from vitpar.strategy import parse
from vitpar.strategy.plan_json import write_plan
from vitpar.training.recipe import Recipe, read_recipe
from vitpar.training.recipe.recipe import Chosen

MODEL = {"name": "vit_custom", "image_size": 8, "patch_size": 4, "embed_dim": 24, "depth": 4, "num_heads": 4}


def recipe(mesh: str, fallbacks: list[str], **parallel: Any) -> Recipe:
    """Return a recipe with batches of 8 images for a model of 4 blocks and 4 heads."""
    options = {f"model.{key}": value for key, value in MODEL.items()} | {"data.path": "x", "train.steps": 1}
    options |= {"train.batch_size": 8, "parallel.mesh": mesh, "parallel.fallback_meshes": fallbacks}
    return read_recipe(None, options | {f"parallel.{key}": value for key, value in parallel.items()})


def chosen(made: Recipe, ranks: int) -> Chosen:
    return made.chosen(made.config(10), lambda plan: plan.resolve(ranks))


@pytest.mark.parametrize(
    ("mesh", "fallbacks", "ranks", "plan", "because"),
    [
        ("pp2xdp", ["fsdp"], 4, "pp2xdp2", None),
        ("pp2xdp", ["fsdp"], 1, "dp1", "the degrees given in 'pp2xdp' multiply to 2, which does not divide 1 rank"),
        ("dp", ["tp3xdp", "pp2xdp"], 6, None, None),
        ("dp", ["tp2xdp"], 16, "tp2xdp8", "a batch of 8 samples does not divide into the 16"),
        ("pp8xdp", ["tp2xdp"], 8, "tp2xdp4", "pp8 makes 8 stages but vit_custom has 4 blocks"),
        ("dp4", ["dp2", "dp1"], 1, "dp1", "'dp2' needs 2 ranks but the world has 1"),
    ],
)
def test_first_fitting_plan_is_used_with_a_reason(
    mesh: str, fallbacks: list[str], ranks: int, plan: str | None, because: str | None
) -> None:
    made = recipe(mesh, fallbacks)
    if plan is None:
        with pytest.raises(StrategyError) as refused:
            chosen(made, ranks)
        assert str(refused.value).startswith(
            "neither parallel.mesh nor any of parallel.fallback_meshes fits: dp: a batch of 8"
        )
        assert "; tp3xdp: tp3 does not divide the 4 heads" in str(refused.value)
        with pytest.raises(StrategyError, match=r"^a batch of 8 samples does not divide"):  # a single plan's own error
            chosen(recipe(mesh, []), ranks)
        assert "; pp2xdp: a batch of 8" in str(refused.value)
        return
    found = chosen(made, ranks)
    assert str(found.plan) == plan
    if because is None:
        assert found.because is None
    else:
        assert found.because is not None and found.because.startswith(f"the plan is '{plan}', since ")
        assert because in found.because


def test_pipeline_settings_apply_only_to_pipeline_plans() -> None:
    made = recipe("pp4xdp", ["pp2xdp", "dp"], schedule="interleaved1f1b", virtual_stages=2, microbatches=4)
    pipeline, alone = chosen(made, 2).plan, chosen(made, 1).plan
    assert (str(pipeline), pipeline.schedule, pipeline.virtual_stages) == ("pp2", "interleaved1f1b", 2)
    assert (str(alone), alone.schedule, alone.virtual_stages) == ("dp1", "1f1b", 1)
    assert pipeline.microbatches == alone.microbatches == 4
    found = chosen(recipe("dp", ["tp2xdp"], microbatches=4), 4)  # 2 images a rank do not divide into 4 micro-batches
    assert str(found.plan) == "tp2xdp2" and found.because is not None and "micro-batches" in found.because


def test_communication_settings_apply_only_to_plans_that_use_them() -> None:
    made = recipe("fsdp4", ["dp"])
    made = made.model_copy(update={"communication": made.communication.model_copy(update={"prefetch": 2})})
    assert made.communication_under(chosen(made, 4).plan).prefetch == 2
    assert made.communication_under(chosen(made, 2).plan).prefetch is None
    first = made.model_copy(update={"parallel": made.parallel.model_copy(update={"mesh": "dp2"})})
    with pytest.raises(StrategyError, match=r"communication\.prefetch is 2, which does nothing with 'dp2'"):
        first.plan(first.config(10))


def test_plan_file_can_have_fallbacks(tmp_path: Path) -> None:
    write_plan(tmp_path / "plan.json", parse("tp2xdp2"))
    made = recipe(str(tmp_path / "plan.json"), ["dp"])
    (tmp_path / "recipe.toml").write_text(made.to_toml())
    again = read_recipe(tmp_path / "recipe.toml")
    assert [str(chosen(again, ranks).plan) for ranks in (4, 2)] == ["tp2xdp2", "dp2"]
    with pytest.raises(RecipeError, match="is a complete plan: leave out the other settings"):
        recipe(str(tmp_path / "plan.json"), ["dp"], microbatches=2).requested_plans()


def test_invalid_fallback_is_refused_even_if_unused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A typo must show when the run starts, not after a lost host when the fallback is needed."""
    words = ["plan", "dp2", "--world-size", "2", "--batch-size", "8", "--set"]
    assert "unknown role 'zp'" in refusal([*words, 'parallel.fallback_meshes=["zp"]'], monkeypatch, capsys)
    assert "fallback_meshes' is 'dp1'" in refusal([*words, "parallel.fallback_meshes=dp1"], monkeypatch, capsys)
