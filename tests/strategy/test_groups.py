"""Names of groups of blocks in plans, lists of layers, and plans suggested where tp fits only some of the groups."""

import json
import re
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vitpar import ViTConfig, model_config, parse, validate
from vitpar.errors import StrategyError
from vitpar.models.config import ModelConfig
from vitpar.models.swin.config import SwinConfig
from vitpar.strategy import Plan
from vitpar.strategy.plan_json import plan_from_json, plan_to_json
from vitpar.strategy.selectors import is_name, layers_of
from vitpar.strategy.validate import unsplittable

TINY = model_config("swin_tiny_patch4_window7_224")
NANO = model_config("swin_nano_patch2_window4_32")
VIT = model_config("vit_tiny_patch16_224")
CHOICES = ("dp4", "fsdp4+ckpt", "tp2xdp2", "tp4+2d", "dp2xfsdp2")


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("pp2: stage1=dp2, *=tp2", "pp2: stage1=dp2, *=tp2"),
        ("PP2 : STAGE2 = dp2 ,Stage1=fsdp2, * = tp2", "pp2: stage1=fsdp2, stage2=dp2, *=tp2"),
        ("pp1: stage10=dp2, stage9=tp2, *=fsdp2", "pp1: stage9=tp2, stage10=dp2, *=fsdp2"),
        (
            "pp1: head=dp2, stage1=dp2, 7=tp2, embed=dp2, 2-3=fsdp2, *=tp2+sp",
            "pp1: embed=dp2, 2-3=fsdp2, 7=tp2, stage1=dp2, head=dp2, *=tp2+sp",
        ),
        ("pp2: stage1=tp2, stage2=dp2, *=tp2", "pp2: stage2=dp2, *=tp2"),
        ("pp2: stage1=tp2, *=tp2", "pp2xtp2"),
        ("pp1: stage1=dp2, stage2=tp2", "pp1: stage1=dp2, stage2=tp2"),
        ("pp: encoder=dp4, *=fsdp4", "pp: encoder=dp4, *=fsdp4"),
        ("pp1: stage1=dp, *=tp2xdp", "pp1: stage1=dp, *=tp2xdp"),
    ],
)
def test_names_have_a_canonical_form(text: str, canonical: str) -> None:
    plan = parse(text)
    assert str(plan) == canonical
    assert parse(canonical) == plan
    assert plan_from_json(json.loads(json.dumps(plan_to_json(plan)))) == plan


@st.composite
def groups(draw: st.DrawFn) -> dict[str, str]:
    """Draw strategies by selector: names and numbers of blocks of swin_nano, without blocks that are named twice."""
    by_stage = {}
    for number in (1, 2, 3):
        first = 2 * (number - 1)
        selectors = draw(
            st.sampled_from([[], [f"stage{number}"], [f"{first}-{first + 1}"], [str(first)], [str(first + 1)]])
        )
        by_stage |= {selector: draw(st.sampled_from(CHOICES)) for selector in selectors}
    by_stage |= {word: draw(st.sampled_from(CHOICES)) for word in draw(st.sets(st.sampled_from(["embed", "head"])))}
    return by_stage | {"*": draw(st.sampled_from(CHOICES))}


@given(groups(), st.randoms(use_true_random=False))
def test_names_stand_for_the_blocks_of_their_group(chosen: dict[str, str], order: st.DrawFn) -> None:
    """Validation numbers the blocks, and every layer gets the strategy that the text gives it."""
    names = list(chosen)
    order.shuffle(names)
    plan = parse("pp1: " + ", ".join(f"{name}={chosen[name]}" for name in names))
    assert plan == parse("pp1: " + ", ".join(f"{name}={text}" for name, text in chosen.items()))
    valid = validate(plan, NANO, 16)
    assert not any(is_name(selector) for selector, _ in valid.layers)
    assert validate(valid, NANO, 16) == valid
    found = valid.strategies(NANO.layer_names)
    for index, layer in enumerate(NANO.layer_names):
        block = str(index - 1)
        stage, first = f"stage{(index + 1) // 2}", (index - 1) // 2 * 2
        selectors = (layer,) if layer in ("embed", "head") else (block, f"{first}-{first + 1}", stage)
        text = next((chosen[name] for name in selectors if name in chosen), chosen["*"])
        assert found[layer] == parse(text).strategy


def test_equal_neighbours_are_joined_when_numbered() -> None:
    plan = validate(parse("pp1: stage1=dp2, stage2=dp2, *=tp2"), NANO, 8)
    assert str(plan) == "pp1: 0-3=dp2, *=tp2"
    assert str(validate(parse("pp1: stage1=dp2, stage2=dp2, stage3=dp2"), NANO, 8)) == "pp1: 0-5=dp2"


@pytest.mark.parametrize(
    ("text", "config", "message"),
    [
        ("pp1: stag1=dp2, *=tp2", NANO, "(did you mean 'stage1'?): use embed, head, stage1, stage2, stage3 or numbers"),
        ("pp1: stage4=dp2, *=tp2", NANO, "swin_nano_patch2_window4_32 has no blocks called 'stage4'"),
        ("pp1: haed=dp2, *=tp2", NANO, "(did you mean 'head'?): use embed, head, stage1"),
        ("pp2: blk=dp2", VIT, "vit_tiny_patch16_224 has no blocks called 'blk': use embed, head, numbers as in 0-11"),
        ("pp1: 0-2=dp2, stage2=fsdp2, *=tp2", NANO, "block 2 is in two groups: give it one strategy"),
        ("pp1: 5=dp2, stage3=fsdp2, *=tp2", NANO, "block 5 is in two groups: give it one strategy"),
        ("pp1: stage1=dp2, stage3=tp2", NANO, "block 2 has no strategy: add a group such as *=dp2"),
        ("pp1: stage1=tp2, *=dp2", TINY, "tp2 does not divide the 3 heads of stage1 of swin_tiny_"),
    ],
)
def test_names_that_do_not_fit_the_model_are_refused(text: str, config: ViTConfig | SwinConfig, message: str) -> None:
    plan = parse(text)
    with pytest.raises(StrategyError, match=re.escape(message)):
        validate(plan, config, None)


def test_strategies_of_names_need_a_model() -> None:
    with pytest.raises(StrategyError, match="validate the plan for the model"):
        parse("pp1: stage1=dp2, *=tp2").strategies(NANO.layer_names)


def test_suggestion_names_the_stage_its_heads_and_a_layerwise_plan() -> None:
    with pytest.raises(StrategyError) as caught:
        validate(parse("tp2"), TINY, None)
    assert str(caught.value) == (
        "tp2 does not divide the 3 heads of stage1 of swin_tiny_patch4_window7_224: "
        "give them another strategy, as in 'pp1: stage1=dp2, *=tp2'"
    )


MODELS = {
    "tiny": TINY,
    "large": model_config("swin_large_patch4_window7_224"),
    "odd features": model_config(
        "swin_custom", patch_size=4, image_size=32, window_size=2, embed_dim=6, depths=(1, 1, 2), num_heads=(1, 2, 4)
    ),
    "heads of the last stage": model_config(
        "swin_custom", patch_size=4, image_size=32, window_size=2, embed_dim=24, depths=(2, 2, 2), num_heads=(4, 4, 3)
    ),
}
DATA = ("", "xdp2", "xfsdp2", "xdp2xfsdp3")
TENSOR = (
    *("tp2", "tp4", "tp3", "tp8", "tp2+sp", "tp4+sp", "tp4+2d", "tp9+2d", "tp16+2d", "tp8+2.5d", "tp8+3d"),
    "tp27+3d",
)
FLAGS = ("", "+ckpt", "+offload", "+zero1")


def uniform_plans() -> list[Plan]:
    found = []
    for tensor, data, flag, pp in product(TENSOR, DATA, FLAGS, ("", "pp2x", "pp4x")):
        axes, _, mode = tensor.partition("+")
        try:
            found.append(parse(f"{pp}{axes}{data}{'+' * bool(mode)}{mode}{flag}"))
        except StrategyError:  # zero1 without dp
            continue
    return [*found, parse("tp2xpp2"), parse("dp2xtp2xpp2"), parse("dp3xpp2xtp4+sp")]


@pytest.mark.parametrize("model", MODELS)
def test_every_suggestion_validates(model: str) -> None:
    """Where tp fits a group of blocks, the suggested plan gives it the strategy that was asked for."""
    config, suggestions, refused = MODELS[model], 0, 0
    for plan in uniform_plans():
        try:
            validate(plan, config, None)
        except StrategyError as error:
            refused += 1
            found = re.fullmatch(r".*: give them another strategy, as in '(.+)'", str(error))
            fits = [
                name
                for name, blocks in config.groups.items()
                if not any(unsplittable(config.layers[f"blocks.{i}"], plan.strategy) for i in blocks)
            ]
            assert bool(found) == bool(fits), (str(plan), str(error))
            if found:
                suggestions += 1
                suggested = validate(parse(found[1]), config, None)
                assert suggested.world_size == plan.world_size
                strategies = suggested.strategies(config.layer_names)
                for name, blocks in config.groups.items():
                    chosen = {strategies[f"blocks.{i}"] for i in blocks}
                    assert (chosen == {plan.strategy}) == (name in fits), (str(plan), found[1])
    assert suggestions and refused


def test_suggestion_fits_the_batch_and_the_schedule_too() -> None:
    """With tp as dp, a batch of 6 would have to be split in 4: another tp is suggested."""
    with pytest.raises(StrategyError, match=r"give them another strategy, as in 'pp1: stage1=dp4, \*"):
        validate(parse("dp2xtp2"), TINY, 8)
    with pytest.raises(StrategyError, match=r"of stage1 of swin_tiny_patch4_window7_224: use tp3$"):
        validate(parse("dp2xtp2"), TINY, 6)
    with pytest.raises(StrategyError, match=r"give them another strategy, as in 'pp2: stage1=dp2, \*"):
        validate(replace(parse("tp2xpp2"), schedule="interleaved1f1b", virtual_stages=2), TINY, 8)


SWIN = model_config("swin_nano_patch2_window4_32")


def found(text: str, config: ModelConfig = SWIN) -> list[str]:
    chosen = layers_of(text, config.layer_names, config.groups, config.name)
    return [name for name in config.layer_names if name in chosen]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("embed", ["embed"]),
        (" embed ,0", ["embed", "blocks.0"]),
        ("1-2, 2-3, head", ["blocks.1", "blocks.2", "blocks.3", "head"]),
        ("stage2", ["blocks.2", "blocks.3"]),
        ("*", [f"blocks.{index}" for index in range(6)]),
    ],
)
def test_list_names_layers(text: str, expected: list[str]) -> None:
    """Blocks may be named twice; * stands for all blocks, so that `embed, *` leaves the head."""
    assert found(text) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "'' is not a layer selector"),
        ("embed,", "'' is not a layer selector"),
        ("3-1", "blocks '3-1' run backwards: write 1-3"),
        ("4-6", "'4-6' names block 6, but swin_nano_patch2_window4_32 has 6 blocks, 0 to 5: change it"),
        ("stage4", "has no blocks called 'stage4'"),
        ("embed=dp2", "'embed=dp2' is not a layer selector"),
        ("stem", "has no blocks called 'stem'"),
    ],
)
def test_unknown_layers_are_refused(text: str, message: str) -> None:
    with pytest.raises(StrategyError, match=message.replace("(", r"\(")):
        found(text)


def test_models_without_names_say_which_selectors_exist() -> None:
    with pytest.raises(StrategyError, match="has no blocks called 'stage1': use embed, head, numbers as in 0-11"):
        found("stage1", VIT)
