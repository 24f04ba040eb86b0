"""Descriptions of layers, which come from running them, against roles and formulas that are written by hand."""

import json
from itertools import pairwise
from typing import Any

import pytest
import torch

from helpers.text_models import V1_1, t5
from vitpar.models import model_config
from vitpar.models.families import SHIPPED, config_from_json, config_to_json

VIT = {"patch_size": 4, "image_size": 12, "embed_dim": 24, "depth": 2, "num_heads": 3, "mlp_hidden_dim": 42}
MODERN = {"qk_norm": True, "attn_norm": True, "mlp_norm": True, "activation": "swiglu", "layer_scale": 0.1}
TOKENS = {"num_reg_tokens": 4, "distillation": True, "representation_size": 10, "qkv_bias": "qv"}
CONFIGS = {
    "modern": model_config("vit_custom", **VIT, **MODERN, **TOKENS),
    "pooled": model_config("vit_custom", **VIT, pool="map", parallel_blocks=True, activation="swiglu"),
    "swin": model_config("swin_nano_patch2_window4_32"),
    "mae": model_config("mae_vit_base"),
    "bert": model_config("bert_base", tokens=128),
    "t5": t5(**V1_1),
}
MLP = {"column": "mlp.fc1", "row": "mlp.fc2"}
PLAIN = {"norm": "norm1 norm2", "column": "attn.qkv mlp.fc1", "row": "attn.proj mlp.fc2"}
T5 = {"column": "attn.qkv mlp.fc1", "row": "attn.proj mlp.fc2", "table": "attn.relative_attention_bias"}
T5 |= {"gate": "mlp.activation"}
ROWS: list[tuple[str, str, dict[str, str], dict[str, int]]] = [
    ("modern", "embed", {"token": "cls_token dist_token reg_token pos_embed", "embedding": "patch_embed.proj"}, {}),
    (
        *("modern", "blocks.1"),
        PLAIN
        | {"heads": "attn.q_norm attn.k_norm", "per_head": "attn.q_bias attn.v_bias", "scale": "ls1.gamma ls2.gamma"}
        | {"inner_norm": "attn.norm mlp.norm", "gate": "mlp.activation"},
        {"head": 3, "hidden feature": 42},
    ),
    (
        *("modern", "head"),
        {"norm": "norm", "pooled": "pooled", "representation": "representation", "classifier": "fc fc_dist"},
        {"classifier feature": 10},
    ),
    (
        *("pooled", "blocks.0"),
        {"norm": "norm1", "column": "in_proj", "gate": "activation", "row": "out_proj"},
        {"head": 3, "hidden feature": 42},
    ),
    (
        *("pooled", "head"),
        {"norm": "norm attn_pool.norm", "heads": "attn_pool.latent", "per_head": "attn_pool.q", "pooled": "pooled"}
        | {"column": "attn_pool.kv attn_pool.mlp.fc1", "row": "attn_pool.proj attn_pool.mlp.fc2", "classifier": "fc"},
        {"classifier feature": 24, "head": 3, "hidden feature": 42},
    ),
    ("swin", "embed", {"embedding": "patch_embed.proj", "norm": "patch_embed.norm"}, {}),
    (
        *("swin", "blocks.2"),
        PLAIN
        | {"norm": "downsample.norm norm1 norm2", "merge": "downsample.reduction"}
        | {"per_head": "attn.relative_position_bias_table"},
        {"incoming feature": 32, "head": 4, "hidden feature": 256},
    ),
    ("mae", "embed", {"token": "cls_token", "embedding": "patch_embed.proj"}, {}),
    ("mae", "blocks.0", PLAIN, {"head": 12, "hidden feature": 3072}),
    (
        *("mae", "blocks.12", {"token": "mask_token", "norm": "norm", "merge": "proj"}),
        {"incoming feature": 768, "outgoing feature": 512},
    ),
    ("mae", "head", {"norm": "norm", "gathered": "gathered", "classifier": "fc"}, {"classifier feature": 512}),
    (
        *("bert", "embed"),
        {"token": "pos_embed", "vocabulary_embedding": "word_embeddings", "norm": "norm"}
        | {"other": "token_type_embeddings"},
        {},
    ),
    ("bert", "blocks.3", PLAIN, {"head": 12, "hidden feature": 3072}),
    ("bert", "head", {"other": "dense", "norm": "norm", "vocabulary_output": "fc"}, {}),
    ("t5", "blocks.0", T5 | {"norm": "norm1 norm2"}, {"head": 4, "hidden feature": 20}),
    ("t5", "blocks.2", {"norm": "norm", "vocabulary_embedding": "word_embeddings"}, {}),
    (
        *("t5", "blocks.3"),
        T5
        | {"norm": "norm1 norm2 norm3", "column": "attn.qkv cross_attn.q cross_attn.kv mlp.fc1"}
        | {"row": "attn.proj cross_attn.proj mlp.fc2"},
        {"head": 4, "hidden feature": 20},
    ),
]
"""Models, layers, names of parts by role, and what the degree of tp has to divide."""


@pytest.mark.parametrize(("model", "layer", "roles", "divisible"), ROWS, ids=[f"{row[0]} {row[1]}" for row in ROWS])
def test_every_part_has_its_role(model: str, layer: str, roles: dict[str, str], divisible: dict[str, int]) -> None:
    described = CONFIGS[model].layers[layer]
    found: dict[str, set[str]] = {}
    for part in described.parts:
        found.setdefault(part.role, set()).add(part.name)
    assert found == {role: {*names.split()} for role, names in roles.items()}
    assert described.divisible == divisible


def test_operations_are_those_of_formulas() -> None:
    def block(tokens: int, width: int, hidden: int, attended: int) -> int:
        return 8 * tokens * width**2 + 4 * tokens * attended * width + 4 * tokens * width * hidden

    swin, mae, bert, t5 = (CONFIGS[name] for name in ("swin", "mae", "bert", "t5"))
    text: Any = t5
    inner, d, h = text.num_heads * text.head_dim, text.embed_dim, 3 * text.mlp_hidden_dim  # gates and values
    encoder = text.tokens * (8 * d * inner + 4 * text.tokens * inner + 2 * d * h)
    crossed = text.decoder_tokens * (4 * d * inner + 4 * text.tokens * inner) + text.tokens * 4 * d * inner
    decoder = text.decoder_tokens * (8 * d * inner + 4 * text.decoder_tokens * inner + 2 * d * h) + crossed
    patches = 2 * 64 * 128 * 64 + block(64, 64, 256, 16)  # merging, then windows of 16 tokens
    for layer, forward in (
        (model_config("vit_base_patch16_224").layers["blocks.7"], block(197, 768, 3072, 197)),
        (swin.layers["blocks.1"], block(256, 32, 128, 16)),
        (swin.layers["blocks.2"], patches),
        (mae.layers["blocks.0"], block(50, 768, 3072, 50)),
        (mae.layers["blocks.13"], block(197, 512, 2048, 197)),
        (bert.layers["blocks.0"], block(128, 768, 3072, 128)),
        (bert.layers["head"], 2 * 128 * 768 * (768 + 30522)),
        (t5.layers["blocks.0"], encoder),
        (t5.layers["blocks.3"], decoder),
    ):
        assert layer.flops == 3 * forward, layer


def test_layers_of_published_models_fit_each_other_and_their_json() -> None:
    for name in SHIPPED:
        config = model_config(name)
        assert all(before.gives == after.takes for before, after in pairwise(config.layers.values())), name
        assert config_from_json(json.loads(json.dumps(config_to_json(config)))) == config


def test_descriptions_do_not_depend_on_where_they_are_needed_first() -> None:
    config = model_config("vit_custom", **VIT, layer_scale=0.2)
    with torch.inference_mode():
        inside = config.layers
    assert inside == model_config("vit_custom", **VIT, layer_scale=0.2).layers
