"""Imported weights compared with the libraries they come from: names, logits and every parameter's gradient."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from helpers.foreign_models import randomised, transformers_model
from helpers.foreign_weights import CLASSES, as_transformers, saved, timm_state, transformers_config
from helpers.imported import IMAGES, assert_same_function, model_of
from helpers.modern_vits import images, modern_config
from helpers.oracles import timm, transformers
from vitpar import model_config
from vitpar.errors import DataError
from vitpar.models import ViTConfig
from vitpar.models.vit.published import PUBLISHED
from vitpar.recipe import read_recipe
from vitpar.weights.foreign import FAMILIES, recognised
from vitpar.weights.importing import import_weights

# `test_exports.py` compares models whose weights vitpar has written, in the same way, among these ViT and DeiT.


def test_transformers_weights_give_equal_gradients(tmp_path: Path) -> None:
    """Import a DeiT without the classifier of the distillation token, which becomes a register."""
    torch.manual_seed(0)
    model, config = randomised(transformers_model("deit", layer_norm_eps=1e-6)), transformers_config("deit")
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    imported = import_weights(saved(tmp_path / "weights", weights, config), tmp_path / "imported")
    assert_same_function(model_of(tmp_path / "imported").double(), model.double(), IMAGES.double(), tmp_path, config)
    assert imported.format == "transformers" and not imported.config.distillation
    recipe = read_recipe(tmp_path / "imported" / "recipe.toml", {"data.path": "x"})
    assert recipe.config(CLASSES).norm_eps == config["layer_norm_eps"] == 1e-6


def test_missing_layer_norm_eps_takes_transformers_default(tmp_path: Path) -> None:
    config = transformers_config("vit")
    del config["layer_norm_eps"]
    default = transformers.AutoConfig.for_model("vit").layer_norm_eps
    result = import_weights(saved(tmp_path / "there", as_transformers(timm_state()), config), tmp_path / "here").config
    assert result.norm_eps == default == 1e-12


THEIRS = [name for name in PUBLISHED if not name.startswith(("vit5", "vit_22b", "vit_tiny_patch32"))]
QUICK = (
    *("deit3_small_patch16_224", "vit_small_patch14_reg4_dinov2", "vit_small_plus_patch16_dinov3"),
    *("eva02_tiny_patch14_224", "vit_base_patch16_siglip_224", "vit_medium_patch16_gap_256"),
)


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n not in QUICK)) for n in THEIRS])
def test_names_stand_for_timms_models(name: str) -> None:
    """Infer the configuration from timm's tensors and name, and compare it; no memory is allocated."""
    with torch.device("meta"):
        model = timm.create_model(name, num_classes=1000)
    shapes = {key: tuple(parameter.shape) for key, parameter in model.named_parameters()}
    expected = model_config(name)
    assert isinstance(expected, ViTConfig)
    said = {"architecture": name, "global_pool": {"cls": "token"}.get(expected.pool, expected.pool)}
    family, found = recognised(name, shapes)
    assert not found.unknown
    config = family.infer_config(name, found, family.said(said))
    assert config.parameters == sum(parameter.numel() for parameter in model.parameters())
    same = {"name": config.name, "layer_scale": config.layer_scale, "image_size": config.image_size}
    assert config == replace(expected, **same)
    assert expected.image_size == (config.image_size if expected.positions else model.default_cfg["input_size"][-1])
    block = model.blocks[0]
    approximate = "Tanh" in type(block.mlp.act).__name__ or getattr(block.mlp.act, "approximate", "none") == "tanh"
    assert (expected.activation == "gelu_tanh") is approximate
    assert block.norm1.eps == expected.norm_eps
    if expected.layer_scale is not None:
        gamma = getattr(block, "ls1", None)
        assert (gamma.init_values if gamma is not None else block.init_values) == expected.layer_scale


SIZES = {"img_size": 8, "patch_size": 2, "embed_dim": 48, "depth": 2, "num_heads": 4, "num_classes": 5}


def eva(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    return randomised(timm.models.eva.Eva(**{**SIZES, "mlp_ratio": 4 * 2 / 3, **options}))


def plain(model: Any = timm.models.vision_transformer.VisionTransformer, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    return randomised(model(**SIZES, **options))


def parallel(**options: Any) -> nn.Module:
    model = plain(block_fn=timm.models.vision_transformer.ParallelScalingBlock, **options)
    for block in model.blocks:
        torch.nn.init.zeros_(block.mlp_out_proj.bias)  # vitpar adds the two biases, and would round their sum
    return model


ROTATED = {"use_rot_pos_emb": True, "ref_feat_shape": (3, 3)}
MODELS: dict[str, Any] = {
    "gates in one tensor": (eva, {**ROTATED, "swiglu_mlp": True}, "eva02_tiny_patch14_224"),
    "gates apart, normed": (
        eva,
        {**ROTATED, "swiglu_mlp": True, "scale_mlp": True, "scale_attn_inner": True, "qkv_fused": False},
        "eva02_base_patch14_224",
    ),
    "class token read": (eva, {**ROTATED, "global_pool": "token"}, "eva02_tiny_patch14_224"),
    "attention pooling after registers": (plain, {"global_pool": "map", "class_token": False, "reg_tokens": 2}, None),
    "attention pooling, class token unread": (plain, {"global_pool": "map", "reg_tokens": 1}, None),
    "average, class token unread": (plain, {"global_pool": "avg", "reg_tokens": 1, "fc_norm": False}, None),
    "distilled": (plain, {"model": timm.models.deit.VisionTransformerDistilled}, None),
    "norms of queries and keys, scales": (plain, {"qk_norm": True, "init_values": 1.0}, None),
    "parallel blocks with biases": (parallel, {"qkv_bias": True, "qk_norm": True, "init_values": 1.0}, None),
}


@pytest.mark.parametrize("case", MODELS)
def test_logits_and_gradients_equal_timms(case: str, tmp_path: Path) -> None:
    build, options, architecture = MODELS[case]
    theirs = build(**options)
    said = {"model_args": {"num_heads": 4, "ref_feat_shape": [3, 3]}, "global_pool": options.get("global_pool", "avg")}
    said |= {"architecture": architecture or "vit_none"}
    said |= {} if architecture else {"global_pool": options.get("global_pool", "token")}
    weights = {name: p.detach().clone() for name, p in theirs.named_parameters()}
    import_weights(saved(tmp_path / "weights", weights, said), tmp_path / "imported")
    ours, theirs = model_of(tmp_path / "imported").double(), theirs.double()
    for layer in ours.layers().values():
        layer.reset_buffers()
    config = ours.config
    if architecture:
        attention = next(iter(ours.blocks.values())).attn
        table = torch.cat([attention.sines, attention.cosines], dim=-1)[config.prefix_tokens :]
        torch.testing.assert_close(theirs.rope.pos_embed, table, atol=2e-6, rtol=0)
        theirs.rope.pos_embed = table
    assert_same_function(ours, theirs, images(config), tmp_path, said)


def test_rotary_positions_that_nothing_tells_are_asked_for(tmp_path: Path) -> None:
    weights = {name: p.detach() for name, p in eva(**ROTATED).named_parameters()}
    with pytest.raises(DataError, match="do not show the number of heads"):
        import_weights(saved(tmp_path / "there", weights), tmp_path / "here")
    said = {"architecture": "vit_none", "model_args": {"num_heads": 4}}
    with pytest.raises(DataError, match="do not show their rotary positions: name the model with --model"):
        import_weights(saved(tmp_path / "there", weights, said), tmp_path / "here")


TIMMS = {"architecture": "eva02_tiny_patch14_224"}
SETTINGS: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("vit", {"model_type": "vit", "hidden_act": "silu"}, "hidden_act 'silu', but only gelu, gelu_pytorch_tanh can be"),
    ("vit", {"model_type": "beit"}, "has model_type 'beit', but only vit, "),
    ("vit", {"model_type": "vit", "layer_norm_eps": "x"}, "has layer_norm_eps 'x', which is not a number: correct it"),
    ("vit", {**TIMMS, "model_args": {"act_layer": "silu"}}, "act_layer 'silu', but only gelu, gelu_tanh can"),
    ("vit", {**TIMMS, "model_args": {"rope_type": "mixed"}}, "rope_type 'mixed', but only cat, dinov3 can"),
    ("vit", {**TIMMS, "model_args": {"pool_include_prefix": True}}, "has pool_include_prefix, but vitpar's models"),
    ("swin", {"model_type": "swin", "layer_norm_eps": 1e-6}, "has layer_norm_eps 1e-06, but only 1e-05 can"),
    ("mae", {"model_type": "vit_mae", "hidden_act": "relu"}, "has hidden_act 'relu', but only gelu can"),
    ("bert", {"model_type": "bert", "hidden_act": "relu"}, "has hidden_act 'relu', but only gelu can be imported"),
    ("t5", {"model_type": "t5", "feed_forward_proj": "gated-silu"}, "'gated-silu', but only relu, gated-gelu can"),
)


def test_settings_that_vitpar_lacks_are_refused() -> None:
    for family, config, message in SETTINGS:
        with pytest.raises(DataError, match=re.escape(message)):
            FAMILIES[family].said(config)


def vit5_logits(state: dict[str, Tensor], pixels: Tensor, heads: int, depth: int, eps: float) -> Tensor:
    """Compute ViT-5 (arXiv 2602.08071) from its formulas, with registers at the end of the sequence as its authors."""
    patch = state["patch_embed.proj.weight"].shape[-1]
    x = F.conv2d(pixels, state["patch_embed.proj.weight"], state["patch_embed.proj.bias"], stride=patch)
    grid, x = x.shape[-1], x.flatten(2).mT + state["pos_embed"]
    count, registers = len(x), state["reg_token"].shape[1]
    tokens = (state[name].expand(count, -1, -1) for name in ("cls_token", "reg_token"))
    first, last = tokens
    x = torch.cat([first, x, last], dim=1)

    def rms(value: Tensor, weight: Tensor) -> Tensor:
        return value / (value.square().mean(-1, keepdim=True) + eps).sqrt() * weight

    def turned(value: Tensor, side: int, temperature: float) -> Tensor:
        """value: [batch, heads, side · side, features], as complex numbers of neighbouring features."""
        pairs = torch.view_as_complex(value.unflatten(-1, (-1, 2)).contiguous())
        quarter = pairs.shape[-1] // 2
        speeds = temperature ** (-torch.arange(quarter, dtype=torch.float64) / quarter)
        places = torch.arange(side, dtype=torch.float64)
        rows, columns = places.repeat_interleave(side), places.repeat(side)
        angles = torch.cat([rows[:, None] * speeds, columns[:, None] * speeds], dim=1)
        angles = angles.cos().float().double() + 1j * angles.sin().float().double()  # tables are float32 in vitpar
        return torch.view_as_real(pairs * angles).flatten(-2)

    def rotated(value: Tensor) -> Tensor:
        parts = value.split([1, grid * grid, registers], dim=2)
        side = round(registers**0.5)
        return torch.cat([parts[0], turned(parts[1], grid, 10000.0), turned(parts[2], side, 100.0)], dim=2)

    for index in range(depth):
        p = {name.removeprefix(f"blocks.{index}."): tensor for name, tensor in state.items()}
        qkv = F.linear(rms(x, p["norm1.weight"]), p["attn.qkv.weight"]).unflatten(-1, (3, heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        q, k = (rotated(rms(value, p[f"attn.{n}_norm.weight"])) for value, n in ((q, "q"), (k, "k")))
        weights = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
        attended = (weights @ v).transpose(1, 2).flatten(2)
        x = x + p["gamma_1"] * F.linear(attended, p["attn.proj.weight"], p["attn.proj.bias"])
        hidden = F.gelu(F.linear(rms(x, p["norm2.weight"]), p["mlp.fc1.weight"], p["mlp.fc1.bias"]))
        x = x + p["gamma_2"] * F.linear(hidden, p["mlp.fc2.weight"], p["mlp.fc2.bias"])
    return F.linear(rms(x, state["norm.weight"])[:, 0], state["head.weight"], state["head.bias"])


def test_vit5_computes_what_its_paper_says(tmp_path: Path) -> None:
    config = modern_config("vit5")
    d, h, head = config.embed_dim, config.mlp_hidden_dim, config.head_dim
    generator = torch.Generator().manual_seed(3)
    shapes: dict[str, tuple[int, ...]] = {
        **{"cls_token": (1, 1, d), "reg_token": (1, 4, d), "pos_embed": (1, config.patches, d)},
        **{"patch_embed.proj.weight": (d, 3, 2, 2), "patch_embed.proj.bias": (d,)},
        **{"norm.weight": (d,), "head.weight": (5, d), "head.bias": (5,)},
    }
    for index in range(config.depth):
        parts = {
            **{"norm1.weight": (d,), "norm2.weight": (d,), "gamma_1": (d,), "gamma_2": (d,)},
            **{"attn.qkv.weight": (3 * d, d), "attn.q_norm.weight": (head,), "attn.k_norm.weight": (head,)},
            **{"attn.proj.weight": (d, d), "attn.proj.bias": (d,), "attn.rope.freqs": (head // 4,)},
            **{"mlp.fc1.weight": (h, d), "mlp.fc1.bias": (h,), "mlp.fc2.weight": (d, h), "mlp.fc2.bias": (d,)},
        }
        shapes |= {f"blocks.{index}.{name}": shape for name, shape in parts.items()}
    state = {name: 0.4 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    done = import_weights(saved(tmp_path / "there", state), tmp_path / "here")
    same = {"name": done.config.name, "layer_scale": done.config.layer_scale, "init": done.config.init}
    assert done.config == replace(config, **same)
    ours = model_of(tmp_path / "here").double()
    for layer in ours.layers().values():
        layer.reset_buffers()
    doubled = {name: tensor.double() for name, tensor in state.items()}
    expected = vit5_logits(doubled, images(config), config.num_heads, config.depth, config.norm_eps)
    torch.testing.assert_close(ours(images(config)), expected, atol=1e-10, rtol=1e-10)
