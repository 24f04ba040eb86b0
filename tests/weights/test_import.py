"""Import of foreign weights and users' checkpoints: equal logits, refusals of what does not fit, recipes for a run."""

import argparse
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from helpers.command_line import Command
from helpers.foreign_models import timm_logits
from helpers.foreign_weights import CLASSES, TIMM_CONFIG, WIDTH, as_transformers, saved, timm_state, transformers_config
from helpers.imported import IMAGES, logits_of, model_of
from vitpar.checkpoint.index import read_class_names
from vitpar.errors import DataError
from vitpar.models.initial import initial_value
from vitpar.recipe import read_recipe
from vitpar.weights.folder import RECIPE, open_weights
from vitpar.weights.importing import ImportedWeights, import_weights, resampled


def test_sharded_safetensors_with_an_index_are_imported(tmp_path: Path) -> None:
    state = as_transformers(timm_state())
    folder, names = tmp_path / "there", sorted(state)
    folder.mkdir()
    weight_map = {}
    for number in range(3):
        part = {name: state[name] for name in names[number::3]}
        save_file(part, folder / f"model-{number}.safetensors")
        weight_map |= dict.fromkeys(part, f"model-{number}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(transformers_config()))
    done = import_weights(folder, tmp_path / "here", shard_bytes=5_000)
    assert len(done.files) > 3
    torch.testing.assert_close(logits_of(tmp_path / "here"), timm_logits(timm_state(), IMAGES), atol=1e-5, rtol=1e-5)


def test_newer_transformers_names_are_imported(tmp_path: Path) -> None:
    newer = {}
    for name, tensor in as_transformers(timm_state()).items():
        name = name.replace("encoder.layer.", "layers.").replace("attention.attention.", "attention.")
        name = re.sub(r"attention\.(q|k|v)(uery|ey|alue)\.", r"attention.\1_proj.", name)
        name = name.replace("attention.output.dense", "attention.o_proj").replace("intermediate.dense", "mlp.fc1")
        newer[re.sub(r"(layers\.\d+)\.output\.dense", r"\1.mlp.fc2", name)] = tensor
    import_weights(saved(tmp_path / "there", newer, transformers_config()), tmp_path / "here")
    torch.testing.assert_close(logits_of(tmp_path / "here"), timm_logits(timm_state(), IMAGES), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("old", [False, True], ids=["zip", "before torch 1.6"])
def test_pth_file_prefers_the_moving_average(old: bool, tmp_path: Path) -> None:
    from argparse import Namespace

    best, other = timm_state(qk_norm=True), timm_state(qk_norm=True, seed=1)
    content = {
        "model": other,
        "model_ema": {f"module.{name}": tensor.double() for name, tensor in best.items()},
        "optimizer": {"state": {0: {"step": 3}}},
        "args": Namespace(lr=0.1),
    }
    torch.save(content, tmp_path / "last.pth", _use_new_zipfile_serialization=not old)
    done = import_weights(tmp_path / "last.pth", tmp_path / "here")
    assert any("model_ema and model" in note for note in done.notes)
    torch.testing.assert_close(logits_of(tmp_path / "here"), timm_logits(best, IMAGES), atol=1e-5, rtol=1e-5)


def test_own_weights_are_imported_unchanged(tmp_path: Path) -> None:
    import_weights(saved(tmp_path / "there", timm_state(), TIMM_CONFIG), tmp_path / "here")
    done = import_weights(tmp_path / "here", tmp_path / "again")
    assert done.format == "vitpar" and done.config == open_weights(tmp_path / "here").config
    assert torch.equal(logits_of(tmp_path / "again"), logits_of(tmp_path / "here"))
    for model, message in (
        ("vit_tiny_patch4_8", "its embed_dim is 24 instead of 192"),
        ("bert_base", "not a bert_base"),
    ):
        with pytest.raises(DataError, match=message):
            import_weights(tmp_path / "here", tmp_path / "other", model=model)
    state = model_of(tmp_path / "here").state_dict()  # a plain state dict without a configuration
    torch.save(
        {"state_dict": {k: v for k, v in state.items() if "place" not in k and "rate" not in k}}, tmp_path / "x.pt"
    )
    with pytest.raises(DataError, match="the number of heads"):
        import_weights(tmp_path / "x.pt", tmp_path / "bare")


def imported(tmp_path: Path, **options: Any) -> ImportedWeights:
    source = saved(tmp_path / "there", timm_state(), TIMM_CONFIG)
    return import_weights(source, tmp_path / "here", **options)


def test_import_changes_classes_and_image_size(tmp_path: Path) -> None:
    done = imported(tmp_path, classes=4, image_size=20)
    assert (done.config.num_classes, done.config.image_size) == (4, 20)
    assert any("classifier of 4 classes is newly initialised (the file has 7)" in note for note in done.notes)
    assert any("interpolated from 2x2 to 5x5" in note for note in done.notes)
    weights, state = open_weights(tmp_path / "here"), timm_state()
    fresh = initial_value("head.fc.weight", torch.Size((4, WIDTH)), 0, done.config)
    assert torch.equal(weights.read("head.fc.weight"), fresh)
    assert torch.equal(weights.read("embed.pos_embed"), resampled(state["pos_embed"], 1, 5))
    assert torch.equal(weights.read("blocks.0.norm1.bias"), state["blocks.0.norm1.bias"])


def without(*names: str) -> Callable[[dict[str, Tensor]], None]:
    def change(state: dict[str, Tensor]) -> None:
        for name in names:
            del state[name]

    return change


def put(name: str, tensor: Tensor) -> Callable[[dict[str, Tensor]], None]:
    return lambda state: state.__setitem__(name, tensor)


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        (without("blocks.1.norm1.bias"), {}, r"it lacks blocks\.1\.norm1\.bias: use"),
        (put("blocks.0.mlp.gate.weight", torch.ones(3)), {}, r"has blocks\.0\.mlp\.gate\.weight, which"),
        (put("head_dist.weight", torch.ones(CLASSES, WIDTH)), {}, r"the model has no head\.fc_dist\.weight: use"),
        (put("blocks.1.attn.qkv.weight", torch.ones(24, 24)), {}, r"has shape \[24, 24\] but the model has \[72, 24\]"),
        (put("pos_embed", torch.ones(1, 7, WIDTH)), {}, "7 positions, 1 of them before .* form no square grid"),
        (put("patch_embed.proj.weight", torch.ones(WIDTH, 1, 4, 4)), {}, "has 1 input channels"),
        (put("norm.bias", torch.full((WIDTH,), torch.nan)), {}, "norm.bias in .* non-finite"),
        (put("norm.bias", torch.ones(WIDTH, dtype=torch.int64)), {}, "cannot be a parameter: it has dtype I64"),
        (without("patch_embed.proj.weight"), {}, "are not those of timm's, transformers' or vitpar's models"),
        (without("head.weight", "head.bias"), {}, "no classifier: set the number of classes .* --classes N"),
        (lambda state: None, {"model": "vit_tiny_patch4_8"}, "its embed_dim is 24 instead of 192"),
        (lambda state: None, {"image_size": 9}, "patches of 4 pixels do not tile images of 9"),
    ],
)
def test_weights_that_do_not_fit_are_refused(
    change: Callable[[dict[str, Tensor]], Any], options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    state = timm_state()
    change(state)
    with pytest.raises(ValueError, match=message) as caught:
        import_weights(saved(tmp_path / "there", state, TIMM_CONFIG), tmp_path / "here", **options)
    assert "\n" not in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["there"]


def test_class_names_come_from_the_config(tmp_path: Path) -> None:
    names = [f"kind {number}" for number in range(CLASSES)]
    saved(tmp_path / "timm", timm_state(), TIMM_CONFIG | {"label_names": names})
    table = {str(number): name for number, name in reversed(list(enumerate(names)))}
    saved(tmp_path / "transformers", as_transformers(timm_state()), transformers_config("vit") | {"id2label": table})
    saved(tmp_path / "odd", timm_state(), TIMM_CONFIG | {"label_names": [1] * CLASSES})
    nameless = {"id2label": {str(number): f"LABEL_{number}" for number in range(CLASSES)}}
    saved(tmp_path / "nameless", as_transformers(timm_state()), transformers_config("vit") | nameless)
    expected_names: dict[str, Any] = {"timm": names, "transformers": names, "odd": None, "nameless": None}
    for source, expected in expected_names.items():
        import_weights(tmp_path / source, tmp_path / f"{source} imported")
        found = read_class_names(tmp_path / f"{source} imported", CLASSES)
        assert found == (expected and tuple(expected)), source
    import_weights(tmp_path / "timm", tmp_path / "fewer", classes=3)
    assert read_class_names(tmp_path / "fewer", 3) is None


def test_config_of_an_unsupported_model_is_refused(tmp_path: Path) -> None:
    for heads, message in (
        (5, "5 heads do not divide embed_dim 24"),
        (10**12, "heads of vit_custom is 1000000000000: it must be from 1 to 131,072"),
    ):
        config = transformers_config(num_attention_heads=heads)
        with pytest.raises(DataError, match=message):
            import_weights(saved(tmp_path / str(heads), as_transformers(timm_state()), config), tmp_path / "here")


SIDES = {"height": 224, "width": 224}


@pytest.mark.parametrize(
    ("config", "beside", "expected", "note"),
    [
        (transformers_config(), None, (0.5, 1.0, "squash", "bilinear"), ""),
        (
            transformers_config(),
            {"image_mean": [0.4, 0.5, 0.6], "image_std": [1, 1, 1]},
            (0.4, 1.0, "squash", "bilinear"),
            "",
        ),
        (transformers_config(), {"do_normalize": False}, (0.0, 1.0, "squash", "bilinear"), ""),
        (
            transformers_config(),
            {"size": {"shortest_edge": 240}, "do_center_crop": True, "crop_size": SIDES, "resample": 1},
            (0.5, 224 / 240, "center", "lanczos"),
            "",
        ),
        (
            TIMM_CONFIG | {"pretrained_cfg": {"mean": [0.3, 0.3, 0.3], "crop_pct": 0.9, "crop_mode": "border"}},
            None,
            (0.3, 0.9, "border", "bicubic"),
            "",
        ),
        (
            TIMM_CONFIG | {"pretrained_cfg": {"interpolation": "random", "crop_mode": "squash"}},
            None,
            (0.5, 0.875, "squash", "bicubic"),
            "has interpolation 'random', which evaluation lacks",
        ),
    ],
)
def test_preprocessing_follows_the_source(
    config: dict[str, Any], beside: dict[str, Any] | None, expected: tuple[Any, ...], note: str, tmp_path: Path
) -> None:
    state = timm_state() if "architecture" in config else as_transformers(timm_state())
    source = saved(tmp_path / "there", state, config)
    if beside is not None:
        (source / "preprocessor_config.json").write_text(json.dumps(beside))
    done = import_weights(source, tmp_path / "here")
    recipe = read_recipe(tmp_path / "here" / RECIPE, {"data.path": "x"})
    data = recipe.data
    assert (data.mean[0], data.crop_pct, data.crop_mode, data.interpolation) == expected
    assert any(note in sentence for sentence in done.notes) if note else not done.notes
    assert recipe.config(CLASSES) == replace(done.config, layer_scale=None)


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
    "encoder": (lambda s: {"model": behind("encoder.", body(s))}, "names are read after 'encoder.'"),
    "MAE": (lambda s: {"model": {**body(s), **DECODER}}, "the decoder is dropped"),
    "AveragedModel": (lambda s: {**behind("module.", s), "n_averaged": torch.tensor(3)}, ""),
}


def imported_file(content: Any, tmp_path: Path, **options: Any) -> ImportedWeights:
    """Import a file of `content`, with the config.json of timm."""
    (tmp_path / "there").mkdir()
    torch.save(content, tmp_path / "there/pytorch_model.bin")
    (tmp_path / "there/config.json").write_text(json.dumps(TIMM_CONFIG))
    return import_weights(tmp_path / "there", tmp_path / "here", classes=CLASSES, **options)


@pytest.mark.parametrize("name", FILES)
def test_model_is_found(name: str, tmp_path: Path) -> None:
    state, (content, note) = timm_state(), FILES[name]
    done = imported_file(content(state), tmp_path)
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
        imported_file(two, tmp_path)
    import_weights(tmp_path / "there", tmp_path / "here", prefix="one.")
    assert torch.equal(
        open_weights(tmp_path / "here").read("blocks.1.attn.proj.weight"), state["blocks.1.attn.proj.weight"]
    )
    with pytest.raises(DataError, match=r"no tensor of .* has a name that begins with 'three\.'"):
        import_weights(tmp_path / "there", tmp_path / "again", prefix="three.")


def test_local_weights_bring_their_recipe_and_are_exported(place: Path, vitpar: Command) -> None:
    imported_file(timm_state(), place)
    done = vitpar(
        "train", "--weights", "here", "--data", "data", "--steps", "1", "--batch-size", "8", "--run-dir", "run"
    )
    assert done.returncode == 0, done.stderr
    recipe = read_recipe(place / "run/recipe.toml")
    assert recipe.optimizer.lr == 1e-4 and recipe.model.weights == "here" and recipe.data.mean == (0.5, 0.5, 0.5)
    again = vitpar("train", "--weights", "run/weights", "--data", "data", "--mesh", "dp2", "--run-dir", "again")
    assert again.returncode == 0, again.stderr
    done = vitpar("checkpoint", "export", "run/weights", "--format", "timm", "--out", "theirs")
    assert done.returncode == 0 and done.stdout == "run/weights written to theirs: 1 file\n", done.stderr
    ours, theirs = (
        open_weights(place / "run/weights").read("head.fc.bias"),
        load_file(place / "theirs/model.safetensors"),
    )
    assert torch.equal(ours, theirs["head.bias"])
