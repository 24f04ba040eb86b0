"""Names of groups of blocks in plans and in lists of layers."""

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vitpar import ViTConfig, model_config, parse, validate
from vitpar.errors import StrategyError
from vitpar.models.config import ModelConfig
from vitpar.models.swin.config import SwinConfig
from vitpar.strategy.plan_json import plan_from_json, plan_to_json
from vitpar.strategy.selectors import WORDS, blocks_of, layers_of

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
    assert all(selector in WORDS or blocks_of(selector) for selector, _ in valid.layers)
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
        ("tp2", TINY, "tp2 does not divide the 3 heads of stage1 of swin_tiny_patch4_window7_224: use tp3"),
    ],
)
def test_names_that_do_not_fit_the_model_are_refused(text: str, config: ViTConfig | SwinConfig, message: str) -> None:
    plan = parse(text)
    with pytest.raises(StrategyError, match=re.escape(message)):
        validate(plan, config, None)


def test_strategies_of_names_need_a_model() -> None:
    with pytest.raises(StrategyError, match="validate the plan for the model"):
        parse("pp1: stage1=dp2, *=tp2").strategies(NANO.layer_names)


def found(text: str, config: ModelConfig = NANO) -> list[str]:
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
