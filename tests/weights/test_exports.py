"""Modern Vision Transformers against timm, transformers and ONNX Runtime: exported weights, and back again."""

import json
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from helpers.imported import assert_same_function
from helpers.modern_vits import PARTS, images, modern_config, modern_model
from helpers.oracles import timm, transformers
from helpers.written_weights import weights_of
from vitpar import model_config
from vitpar.errors import CheckpointError, DataError
from vitpar.models import ViTConfig
from vitpar.models.initial import initialise
from vitpar.models.layers import LayeredModel
from vitpar.recipe import read_recipe
from vitpar.weights.exporting import CLASSIFIER, ONNX, export_onnx, export_weights
from vitpar.weights.foreign import FAMILIES
from vitpar.weights.importing import import_weights

NOT_IN_TIMM = ("vit5", "vit_22b", "parallel")
IN_TRANSFORMERS = (
    *("dinov2", "dinov2_giant_reg4", "dinov3", "dinov3_qkvb", "dinov3_plus"),
    *("siglip", "siglip2", "siglip_gap"),
)


def exported(parts: str, format: Any, tmp_path: Path, **changed: Any) -> tuple[ViTConfig, LayeredModel, list[str]]:
    """Export the tiny model to ``tmp_path/there``. Return its configuration, the model, and the notes."""
    config = modern_config(parts, **changed)
    model = modern_model(config)
    _, notes = export_weights(
        weights_of(model, config, tmp_path / "here"), tmp_path / "there", format, shard_bytes=10**9
    )
    return config, model.double(), notes


def timm_model(folder: Path) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return timm.create_model(f"local-dir:{folder}", pretrained=True).eval().double()


def share_tables(theirs: nn.Module, ours: LayeredModel, config: ViTConfig) -> None:
    """Give timm's model our tables of rotary positions, after a comparison: it computes its own in float32."""
    if config.rope == "none":
        return
    attention = next(iter(ours.blocks.values())).attn
    table = torch.cat([attention.sines, attention.cosines], dim=-1)[config.prefix_tokens :]
    rope = theirs.rope
    name = "pos_embed" if config.rope == "axial" else "pos_embed_cached"
    torch.testing.assert_close(getattr(rope, name), table, atol=2e-6, rtol=0)
    setattr(rope, name, table)


def config_of(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


@pytest.mark.parametrize("parts", [parts for parts in PARTS if parts not in NOT_IN_TIMM])
def test_timm_reads_what_is_exported_and_computes_the_same(parts: str, tmp_path: Path) -> None:
    config, ours, notes = exported(parts, "timm", tmp_path)
    assert not notes
    theirs = timm_model(tmp_path / "there")
    share_tables(theirs, ours, config)
    assert_same_function(ours, theirs, images(config), tmp_path, config_of(tmp_path / "there"))


@pytest.mark.parametrize(
    ("parts", "size"), [("deit3", 6), ("dinov2", 12), ("siglip", 6), ("siglip_reg", 12), ("gap", 12)]
)
def test_images_of_another_size_get_the_positions_of_timm(parts: str, size: int, tmp_path: Path) -> None:
    config, ours, _ = exported(parts, "timm", tmp_path)
    theirs = timm.create_model(f"local-dir:{tmp_path / 'there'}", pretrained=True, dynamic_img_size=True)
    assert config.resized(size) is not None
    logits, expected = (model.double()(images(config, size=size)) for model in (ours, theirs.eval()))
    torch.testing.assert_close(logits, expected, atol=2e-6, rtol=1e-5)  # timm resamples in float32
    for computed in (logits, expected):
        F.cross_entropy(computed, torch.tensor([0, 3, 4])).backward()
    mine, other = ours.embed.pos_embed.grad, theirs.pos_embed.grad
    torch.testing.assert_close(mine, other, atol=1e-6 * other.abs().max().item(), rtol=1e-5)


def test_timm_prepares_images_as_the_recipe_does(tmp_path: Path) -> None:
    exported("deit3", "timm", tmp_path)
    model = timm.create_model(f"local-dir:{tmp_path / 'there'}", pretrained=True)
    found = timm.data.resolve_data_config(model=model)
    assert found["input_size"] == (3, 8, 8) and found["interpolation"] == "bilinear" and found["crop_pct"] == 0.9
    assert [*found["mean"], *found["std"]] == [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]


@pytest.mark.parametrize(
    ("format", "mode", "pct"), [("timm", "squash", 0.9), ("timm", "border", 1.0), ("transformers", "squash", 0.875)]
)
def test_crops_survive_an_export_and_an_import(format: Any, mode: str, pct: float, tmp_path: Path) -> None:
    config = modern_config("dinov2")
    weights = weights_of(modern_model(config), config, tmp_path / "here")
    (tmp_path / "here/recipe.toml").write_text(
        f'[data]\npath = "x"\ncrop_mode = "{mode}"\ncrop_pct = {pct}\ninterpolation = "lanczos"\n'
    )
    export_weights(weights, tmp_path / "there", format, shard_bytes=10**9)
    import_weights(tmp_path / "there", tmp_path / "again", classes=config.num_classes)
    data = read_recipe(tmp_path / "again/recipe.toml", {"data.path": "x"}).data
    assert (data.crop_mode, data.interpolation) == (mode, "lanczos")
    assert math.floor(config.image_size / data.crop_pct) == math.floor(config.image_size / pct)


def transformers_model(folder: Path, capture: Any = None) -> nn.Module:
    """Load the model whose class config.json names; every warning is an error."""
    name = config_of(folder)["architectures"][0]
    model, report = getattr(transformers, name).from_pretrained(folder, output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    return model.eval().double()


def reader(folder: Path, pool: str) -> Any:
    """Return the function from an output to logits, for models without a classifier; None for those with one."""
    if not (folder / CLASSIFIER).exists():
        return None
    from safetensors.torch import load_file

    head = {name: tensor.double() for name, tensor in load_file(folder / CLASSIFIER).items()}
    return lambda output: F.linear(output.pooler_output, head["classifier.weight"], head["classifier.bias"])


@pytest.mark.parametrize("parts", IN_TRANSFORMERS)
def test_transformers_reads_what_is_exported_and_computes_the_same(parts: str, tmp_path: Path) -> None:
    changed = {"num_reg_tokens": 4, "mlp_hidden_dim": 128} if parts == "dinov2_giant_reg4" else {}
    config, ours, _ = exported(parts, "transformers", tmp_path, **changed)
    theirs = transformers_model(tmp_path / "there")
    if config.rope == "dinov3":
        share_dinov3(theirs, ours, config)
    torch.testing.assert_close(
        ours(images(config)),
        (reader(tmp_path / "there", config.pool) or (lambda output: output.logits))(theirs(images(config))),
        atol=1e-10,
        rtol=1e-10,
    )


def share_dinov3(theirs: nn.Module, ours: LayeredModel, config: ViTConfig) -> None:
    """Give transformers' model our tables of rotary positions, after a comparison."""
    attention = next(iter(ours.blocks.values())).attn
    tables = tuple(table[config.prefix_tokens :].double() for table in (attention.cosines, attention.sines))
    for found, table in zip(theirs.rope_embeddings(images(config)), tables, strict=True):
        torch.testing.assert_close(found, table, atol=2e-6, rtol=0)
    theirs.rope_embeddings.forward = lambda pixels: tables


@pytest.mark.parametrize(
    ("name", "options"),
    [("vit", {}), ("vit", {"qkv_bias": "none", "activation": "gelu_tanh"}), ("deit", {"distillation": True})],
)
def test_vit_and_deit_go_to_transformers(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    config, ours, notes = exported("dinov2", "transformers", tmp_path, layer_scale=None, **options)
    assert not notes
    theirs = transformers_model(tmp_path / "there")
    assert_same_function(ours, theirs, images(config), tmp_path, config_of(tmp_path / "there"))


REFUSED: tuple[tuple[str, str, dict[str, Any], str], ...] = (
    ("vit5", "timm", {}, "has rope_register_temperature 100.0, norm 'rms', which no model of timm has: use --format"),
    ("deit3", "timm", {"distillation": True, "prefix_positions": True, "activation": "swiglu"}, "activation 'swiglu'"),
    ("eva02_base", "transformers", {}, "has fc_norm True, rope 'axial', qkv_bias 'qv', activation 'swiglu', which no"),
    ("dinov3", "transformers", {"pool": "avg", "num_reg_tokens": 0}, "has num_reg_tokens 0"),
    ("dinov3", "transformers", {"layer_scale": None}, "has layer_scale None"),
    ("dinov2", "transformers", {"mlp_hidden_dim": 100}, "which transformers' DINOv2 cannot have: use --format timm"),
)


LACKING: tuple[tuple[str, str, dict[str, Any], str], ...] = (
    ("parallel", "timm", {"rope": "none"}, "blocks.0.in_proj.bias"),
    ("siglip_gap", "timm", {"representation_size": 8}, "head.representation.bias"),
    ("siglip_reg", "transformers", {}, "embed.reg_token"),
    ("dinov3", "transformers", {"pool": "map"}, "head.attn_pool.latent"),
    ("dinov2", "transformers", {"distillation": True}, "embed.dist_token"),
)


def test_parts_and_parameters_that_a_library_lacks_are_refused(tmp_path: Path) -> None:
    for parts, library, changed, message in REFUSED:
        with pytest.raises(DataError, match=message):
            FAMILIES["vit"].exported(modern_config(parts, **changed), library)
    for parts, library, changed, name in LACKING:
        with pytest.raises(DataError, match=f"it cannot hold {name}"):
            exported(parts, library, tmp_path / parts, **changed)
        assert not (tmp_path / parts / "there").exists()


def test_swin_goes_to_timm(tmp_path: Path) -> None:
    sizes = {"image_size": 24, "patch_size": 2, "window_size": 3, "embed_dim": 24, "depths": (1, 2)}
    config = model_config("swin_custom", **sizes, num_heads=(2, 4), num_classes=5, init="perturbed", mlp_ratio=2.5)
    ours = LayeredModel(config)
    initialise(ours, 0, config)
    export_weights(weights_of(ours, config, tmp_path / "here"), tmp_path / "there", "timm", shard_bytes=10**9)
    theirs = timm_model(tmp_path / "there")
    pixels = torch.randn(3, 3, 24, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    assert_same_function(ours.double(), theirs, pixels, tmp_path, config_of(tmp_path / "there"))
    with pytest.raises(DataError, match="can be exported to timm, but not to transformers"):
        FAMILIES["swin"].exported(config, "transformers")


@pytest.mark.parametrize("parts", ["eva02_base", pytest.param("siglip2", marks=pytest.mark.slow)])
def test_onnx_runtime_computes_the_same(parts: str, tmp_path: Path) -> None:
    config = modern_config(parts)
    weights = weights_of(modern_model(config), config, tmp_path / "here")
    assert export_onnx(weights, tmp_path / "there") < 1e-5
    assert {path.name for path in (tmp_path / "there").iterdir()} == {ONNX, "config.json"}
    with pytest.raises(CheckpointError, match="exists and is not empty"):
        export_onnx(weights, tmp_path / "there")


def test_swin_is_exported_too(tmp_path: Path) -> None:
    config = model_config("swin_nano_patch2_window4_32", num_classes=5, init="perturbed")
    model = LayeredModel(config)
    initialise(model, 0, config)
    weights = weights_of(model, config, tmp_path / "here")
    (tmp_path / "here/classes.json").write_text(json.dumps(["ant", "bee", "cat", "dög", "eel"]))
    assert export_onnx(weights, tmp_path / "there") < 1e-5
    assert _metadata(tmp_path / "there") == {
        "num_classes": "5",
        "input_size": "[3, 32, 32]",
        "mean": "[0.1, 0.2, 0.3]",
        "std": "[0.4, 0.5, 0.6]",
        "interpolation": "bilinear",
        "crop_pct": "0.9",
        "crop_mode": "center",
        "label_names": json.dumps(["ant", "bee", "cat", "dög", "eel"]),
    }


def _metadata(folder: Path) -> dict[str, str]:
    """Return the model's metadata as ONNX Runtime reads them."""
    import onnxruntime

    session = onnxruntime.InferenceSession(str(folder / ONNX), providers=["CPUExecutionProvider"])
    return dict(session.get_modelmeta().custom_metadata_map)
