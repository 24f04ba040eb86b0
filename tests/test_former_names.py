"""Plans, weights and checkpoints of earlier versions are refused with the present name."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from helpers.plans import EVERYTHING
from vitpar.checkpoint.reader import load_tensors
from vitpar.errors import CheckpointError, DataError, StrategyError
from vitpar.former_names import former_parameter, present_parameter
from vitpar.models import model_config
from vitpar.models.layers import LayeredModel
from vitpar.strategy import parse
from vitpar.weights.importing import import_weights


def test_former_and_present_parameter_names_translate_both_ways() -> None:
    with torch.device("meta"):
        names = [
            name
            for name, _ in LayeredModel(model_config("vit_tiny_patch16_32", depth=2, **EVERYTHING)).named_parameters()
        ]
    former = [former_parameter(name) for name in names]
    assert [present_parameter(name) for name in former] == names
    assert [present_parameter(name) for name in names] == names
    assert {"stem.proj.weight", "stem.pos_embed", "blocks.1.gamma2"} <= set(former)
    assert not any("embed." in name or ".ls" in name for name in former)


def test_the_former_name_of_a_layer_is_refused() -> None:
    with pytest.raises(StrategyError, match=r"the layer 'stem' is now called 'embed': write embed=…"):
        parse("pp1: stem=dp2, *=fsdp2")


def test_weights_with_former_names_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"stem.proj.weight": torch.zeros(24, 48), "head.fc.bias": torch.zeros(3)}, path)
    words = r"earlier version of vitpar: its tensor 'stem.proj.weight' is now called 'embed.patch_embed.proj.weight'"
    with pytest.raises(DataError, match=words):
        import_weights(path, tmp_path / "here")


def test_a_checkpoint_with_former_names_is_refused() -> None:
    index = SimpleNamespace(tensors={"optimizer.exp_avg.blocks.0.gamma1": None})
    words = r"'optimizer.exp_avg.blocks.0.gamma1' is now called 'optimizer.exp_avg.blocks.0.ls1.gamma'"
    with pytest.raises(CheckpointError, match=words):
        load_tensors(Path("old"), {"optimizer.exp_avg.blocks.0.ls1.gamma": torch.zeros(2)}, index)  # type: ignore[arg-type]
