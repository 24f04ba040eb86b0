"""Import of checkpoints as training code writes them: the model is found behind prefixes and next to other tensors."""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from helpers.command_line import Command
from helpers.foreign_weights import CLASSES, TIMM_CONFIG, timm_state
from vitpar.errors import DataError
from vitpar.training.recipe import read_recipe
from vitpar.weights.folder import open_weights
from vitpar.weights.importing import ImportedWeights, import_weights

State = dict[str, Tensor]


def behind(prefix: str, state: State) -> State:
    """Return the state with a prefix before every name."""
    return {prefix + name: tensor for name, tensor in state.items()}


def body(state: State) -> State:
    """Return the state without its classifier."""
    return {name: tensor for name, tensor in state.items() if not name.startswith("head")}


def other(state: State) -> State:
    """Return a state with other numbers."""
    return {name: tensor * 0 for name, tensor in state.items()}


HEAD = {"head.mlp.0.weight": torch.zeros(4, 24)}
DECODER = {"mask_token": torch.zeros(1, 1, 12), "decoder_embed.weight": torch.zeros(12, 24)}
FILES: dict[str, tuple[Callable[[State], Any], str]] = {
    # content of a file that has the model `state`, and a part of the notes
    "DINO": (
        lambda s: {
            "student": behind("module.backbone.", other(body(s))),
            "teacher": {**behind("backbone.", body(s)), **HEAD},
            "args": argparse.Namespace(arch="vit_small"),
        },
        "head.mlp.0.weight left out",
    ),
    "both in one": (
        lambda s: {**behind("student.backbone.", other(body(s))), **behind("teacher.backbone.", body(s))},
        "names are read after 'teacher.backbone.'",
    ),
    "Lightning": (lambda s: {"state_dict": behind("model.", s), "epoch": 1}, "names are read after 'model.'"),
    "visual": (lambda s: {**behind("visual.", body(s)), "text.weight": torch.zeros(3)}, "text.weight left out"),
    "encoder": (lambda s: {"model": behind("encoder.", body(s))}, "names are read after 'encoder.'"),
    "MAE": (lambda s: {"model": {**body(s), **DECODER}}, "the decoder is dropped"),
    "AveragedModel": (lambda s: {**behind("module.", s), "n_averaged": torch.tensor(3)}, ""),
    "profiled": (lambda s: {**s, "total_ops": torch.zeros(1), "blocks.0.attn.total_params": torch.zeros(1)}, ""),
}


def imported(content: Any, tmp_path: Path, **options: Any) -> ImportedWeights:
    """Import a file of `content`, with the config.json of timm."""
    (tmp_path / "there").mkdir()
    torch.save(content, tmp_path / "there/pytorch_model.bin")
    (tmp_path / "there/config.json").write_text(json.dumps(TIMM_CONFIG))
    return import_weights(tmp_path / "there", tmp_path / "here", classes=CLASSES, **options)


@pytest.mark.parametrize("name", FILES)
def test_model_is_found(name: str, tmp_path: Path) -> None:
    state, (content, note) = timm_state(), FILES[name]
    done = imported(content(state), tmp_path)
    weights = open_weights(tmp_path / "here")
    for parameter in ("blocks.1.attn.proj.weight", "embed.patch_embed.proj.bias", "head.norm.weight"):
        theirs = parameter.removeprefix("embed.").replace("head.norm", "norm")
        assert torch.equal(weights.read(parameter), state[theirs]), parameter
    assert note in "; ".join(done.notes) and bool(note) == any(
        "left out" in n or "after" in n or "dropped" in n for n in done.notes
    )


def test_several_models_are_named(tmp_path: Path) -> None:
    state = timm_state()
    two = {**behind("one.", state), **behind("two.", other(state))}
    with pytest.raises(
        DataError, match=r"several models, with names after 'one\.' or 'two\.': choose one with --prefix"
    ):
        imported(two, tmp_path)
    import_weights(tmp_path / "there", tmp_path / "here", prefix="one.")
    assert torch.equal(
        open_weights(tmp_path / "here").read("blocks.1.attn.proj.weight"), state["blocks.1.attn.proj.weight"]
    )
    with pytest.raises(DataError, match=r"no tensor of .* has a name that begins with 'three\.'"):
        import_weights(tmp_path / "there", tmp_path / "again", prefix="three.")


def test_local_weights_bring_their_recipe_and_are_exported(place: Path, vitpar: Command) -> None:
    imported(timm_state(), place)
    done = vitpar(
        "train", "--weights", "here", "--data", "data", "--steps", "1", "--batch-size", "8", "--run-dir", "run"
    )
    assert done.returncode == 0, done.stderr
    recipe = read_recipe(place / "run/recipe.toml")
    assert recipe.optimizer.lr == 1e-4 and recipe.model.weights == "here" and recipe.data.mean == (0.5, 0.5, 0.5)
    again = vitpar("train", "--weights", "run/weights", "--data", "data", "--mesh", "dp2", "--run-dir", "again")
    assert again.returncode == 0, again.stderr
    done = vitpar("train", "--weights", "gone", "--data", "data")
    assert done.returncode == 2 and "--weights 'gone' does not exist: name a folder of weights" in done.stderr
    done = vitpar("checkpoint", "export", "run/weights", "--format", "timm", "--out", "theirs")
    assert done.returncode == 0 and done.stdout == "run/weights written to theirs: 1 file\n", done.stderr
    ours, theirs = (
        open_weights(place / "run/weights").read("head.fc.bias"),
        load_file(place / "theirs/model.safetensors"),
    )
    assert torch.equal(ours, theirs["head.bias"])
    for words, sentence in (
        (("--format", "vitpar"), "holds weights of vitpar already: name a library with --format"),
        (("--format", "timm", "--no-averages"), "--no-averages has no effect: 'here' has one set of parameters"),
    ):
        done = vitpar("checkpoint", "export", "here", *words, "--out", "other")
        assert done.returncode == 2 and sentence in done.stderr
