"""Lists of layers, as train.freeze has them."""

import pytest

from vitpar import model_config
from vitpar.errors import StrategyError
from vitpar.models.config import ModelConfig
from vitpar.strategy.selectors import layers_of

VIT = model_config("vit_tiny_patch16_224")
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
