"""Rules for a layer's parameters in a step, shared by runtime, prices, search and `vitpar plan`."""

from dataclasses import astuple
from typing import Any

import pytest

from vitpar import model_config
from vitpar.strategy import Communication, Execution, Plan, parse
from vitpar.strategy.execution import Rules
from vitpar.strategy.freezing import listed_parameters

CONFIG = model_config("vit_custom", image_size=8, patch_size=4, embed_dim=8, depth=2, num_heads=2)
LAYERS = CONFIG.layers
LAST, EVERY, END = "last micro-batch", "every micro-batch", "end of step"
PP = {"pipelined": True}
SPLIT = {"pipelined": True, "splits_backward": True}


@pytest.mark.parametrize(
    ("mesh", "layer", "rules", "expected"),
    [
        # wrapped, low-precision copies, offloaded, resharded after forward, resharded after backward, reduced
        ("dp2", "blocks.0", {}, (False, False, False, False, False, LAST)),
        ("dp2", "blocks.0", {"low_precision": True}, (False, True, False, False, False, LAST)),
        ("dp2", "blocks.0", SPLIT, (False, False, False, False, False, END)),
        ("dp2", "blocks.0", {**SPLIT, "low_precision": True}, (True, False, False, False, False, END)),
        ("dp2+offload", "blocks.0", {}, (True, False, True, False, True, LAST)),
        ("tp2", "head", {"low_precision": True}, (False, True, False, False, False, LAST)),
        ("dp2+zero1", "blocks.0", {}, (True, False, False, False, False, LAST)),
        ("dp2+zero2", "blocks.0", {}, (True, False, False, False, False, EVERY)),
        ("dp2+zero2", "blocks.0", PP, (True, False, False, False, False, EVERY)),
        ("fsdp2", "blocks.0", {"low_precision": True}, (True, False, False, True, True, LAST)),
        ("fsdp2", "head", {}, (True, False, False, False, True, LAST)),
        ("fsdp2", "embed", PP, (True, False, False, False, False, END)),
        ("tp4+2d", "blocks.0", {}, (True, False, False, True, True, LAST)),
        ("tp4+2d", "blocks.0", PP, (True, False, False, False, False, END)),
        ("tp2", "blocks.0", PP, (False, False, False, False, False, LAST)),
    ],
)
def test_rules_of_a_layer(mesh: str, layer: str, rules: dict[str, Any], expected: tuple[object, ...]) -> None:
    backward = "weights" if layer == "embed" else "all"
    assert astuple(Rules(**rules).of(parse(mesh).strategy, LAYERS[layer])) == (*expected, backward)


@pytest.mark.parametrize(
    ("mesh", "layer", "settings", "pipelined", "name", "expected"),
    [
        ("fsdp2", "blocks.0", {"reshard_after_forward": False}, False, "gathers_in_backward", False),
        ("fsdp2", "blocks.0", {"reshard_after_forward": False}, False, "gathers_every_forward", True),
        ("fsdp2", "blocks.0", {"reshard_after_forward": True}, True, "gathers_in_backward", True),
        ("fsdp2", "head", {"reshard_after_forward": True}, False, "reshard_after_forward", True),
        ("dp2+zero1", "blocks.0", {"reshard_after_forward": True}, False, "reshard_after_forward", False),
        ("fsdp2", "blocks.0", {"reduce_every_microbatch": True}, True, "reduced", EVERY),
        ("dp2+zero1", "blocks.0", {"reduce_every_microbatch": True}, False, "reduced", LAST),
    ],
)
def test_communication_settings_override_the_rules(
    mesh: str, layer: str, settings: dict[str, bool], pipelined: bool, name: str, expected: object
) -> None:
    rules = Rules(pipelined=pipelined, communication=Communication(**settings))
    assert getattr(rules.of(parse(mesh).strategy, LAYERS[layer]), name) == expected


def test_execution_derives_the_rules_of_a_plan() -> None:
    settings = Communication(prefetch=2)
    zero_bubble = Plan(pp=2, schedule="zbvzerobubble", virtual_stages=2)
    assert Rules.under(zero_bubble, "bf16", settings) == Rules(True, True, True, settings)
    assert Rules.under(parse("fsdp2"), "fp32") == Rules()


@pytest.mark.parametrize(
    ("frozen", "expected"),
    [
        ("", ("weights", "all", "all", "all")),
        ("embed", ("nothing", "weights", "all", "all")),
        ("embed, 0-1", ("nothing", "nothing", "nothing", "weights")),
        ("0, head", ("weights", "inputs", "all", "inputs")),
        ("embed, 1", ("nothing", "weights", "inputs", "all")),
        ("embed, *, !blocks.1.norm1.bias", ("nothing", "nothing", "weights", "all")),
    ],
)
def test_backward_ends_at_the_lowest_trained_layer(frozen: str, expected: tuple[str, ...]) -> None:
    named = listed_parameters(frozen, CONFIG) if frozen else frozenset()
    found = list(Execution(8, frozen=named).layers(parse("fsdp2"), CONFIG).values())
    assert tuple(one.backward for one in found) == expected
    for one in found:
        assert one.trained == (one.backward in ("all", "weights")) == (one.reduced != "never")
        assert one.passes_gradient == (one.backward in ("all", "inputs"))
        assert one.gathers_in_backward == (one.reshard_after_forward and one.backward != "nothing")
