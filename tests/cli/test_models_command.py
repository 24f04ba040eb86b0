"""`vitpar models`: sizes of the published models, and what one consists of."""

import json

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from helpers.command_line import run
from vitpar import model_config, parse, validate
from vitpar.errors import StrategyError
from vitpar.models.families import FAMILIES, SHIPPED, common_tp, kinds, options, size
from vitpar.models.layers import LayeredModel

NAMES = ("vit_base_patch16_224", "swin_large_patch4_window12_384")


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return the list of models, two single models, and some as JSON."""
    commands = [[], *([name] for name in NAMES), ["Base*dinov3", "--json"]]
    found = [run(tmp_path_factory.mktemp("models"), ["models", *words]) for words in commands]
    assert [(done.returncode, done.stderr) for done in found] == [(0, "")] * len(found)
    return [done.stdout for done in found]


def test_list_and_models_fit_80_columns(printed: list[str]) -> None:
    text = printed[0]
    assert max(len(line) for text in printed[:3] for line in text.splitlines()) <= 80
    names = [line.split()[0] for line in text.splitlines() if line.split()]
    assert [name for name in names if name in SHIPPED] == list(SHIPPED)
    # Parameters as timm counts them, and twice the multiply-adds that the papers give.
    assert "vit_base_patch16_224                      86.6 M       35.1         197     224" in text
    assert "swin_tiny_patch4_window7_224              28.3 M        9.0    3,136-49     224" in text
    assert "stage3   blocks.5-21" in printed[2]
    assert "model.window_size  12\n    Side of a window, in tokens." in printed[2]
    some = [one["name"] for one in json.loads(printed[3])["models"]]
    assert some == ["vit_base_patch16_dinov3", "vit_base_patch16_dinov3_qkvb"]


@pytest.mark.parametrize("name", ["swin_nano_patch2_window4_32", "deit_tiny_distilled_patch16_224"])
def test_sizes_are_those_of_the_built_model(name: str) -> None:
    config = model_config(name)
    with torch.device("meta"):
        model, images = LayeredModel(config).eval(), torch.empty(1, 3, config.image_size, config.image_size)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(images)
    whole = size(config)
    assert whole["parameters"] == sum(p.numel() for p in model.parameters())
    assert whole["forward_flops"] == counter.get_total_flops()
    layers = {kind["kind"]: kind["parameters"] for kind in kinds(config)}
    assert {
        name: sum(p.numel() for p in model.layers()[layer.name].parameters()) for name, layer in config.kinds.items()
    } == layers


def test_degrees_are_those_that_plans_accept() -> None:
    config = model_config("swin_tiny_patch4_window7_224")

    def fits(degree: int) -> bool:
        try:
            validate(parse(f"tp{degree}"), config, 8)
        except StrategyError:
            return False
        return True

    assert common_tp(config) == tuple(degree for degree in range(2, 33) if fits(degree))


def test_every_option_says_what_it_does() -> None:
    for family in FAMILIES.values():
        for name in list(family.PUBLISHED)[:1]:
            assert all(options(model_config(name)).values()), name
