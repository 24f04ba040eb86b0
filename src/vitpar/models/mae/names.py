"""A masked autoencoder's weights in the authors' code (github.com/facebookresearch/mae) and transformers (4 and 5).

Blocks of the decoder have numbers of their own. Positions are fixed: vitpar computes them. timm has the encoder alone,
as a Vision Transformer, under the names of the authors' code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from vitpar.errors import DataError
from vitpar.models.convert import Conversion, Exported, Sizes
from vitpar.models.description import block_name
from vitpar.models.mae.config import MAEConfig
from vitpar.models.mae.layers import positions_with_class
from vitpar.models.rows import (
    KERNEL,
    TRANSFORMERS_IMAGES,
    Found,
    Library,
    Row,
    heads,
    input_size,
    numbers,
    read_settings,
    row,
    settings_of,
    stored,
)
from vitpar.models.vit.names import ViTWeights


def _table(decoder: str) -> Callable[[MAEConfig], Tensor]:
    """Return the function that computes fixed positions. decoder: "" or "decoder_"."""
    return lambda config: positions_with_class(config, getattr(config, f"{decoder}embed_dim"))


_NAMES: tuple[tuple[str, str, str], ...] = (
    ("embed.patch_embed.proj.bias", "patch_embed.proj.bias", "vit.embeddings.patch_embeddings.projection.bias"),
    ("embed.cls_token", "cls_token", "vit.embeddings.cls_token"),
    ("dec_embed.norm.*", "norm.*", "vit.layernorm.*"),
    ("dec_embed.proj.*", "decoder_embed.*", "decoder.decoder_embed.*"),
    ("dec_embed.mask_token", "mask_token", "decoder.mask_token"),
    ("head.norm.*", "decoder_norm.*", "decoder.decoder_norm.*"),
    ("head.fc.*", "decoder_pred.*", "decoder.decoder_pred.*"),
)
"""Names in vitpar, the authors' code and transformers."""
_BLOCKS = {
    "num_heads": ("blocks.{}", "blocks.{}", "vit.encoder.layer.{}"),
    "decoder_num_heads": ("decoder.{}", "decoder_blocks.{}", "decoder.decoder_layers.{}"),
}
"""Blocks in the same three, by the field that has their number of heads."""
_IN_BLOCK = (
    ("norm1.*", "norm1.*", "layernorm_before.*"),
    ("attn.proj.*", "attn.proj.*", "attention.output.dense.*"),
    ("norm2.*", "norm2.*", "layernorm_after.*"),
    ("mlp.fc1.*", "mlp.fc1.*", "intermediate.dense.*"),
    ("mlp.fc2.*", "mlp.fc2.*", "output.dense.*"),
)


def _rows(column: int, projection: str, tables: tuple[str, str], *qkv: str) -> tuple[Row, ...]:
    """Return the rows of a library.

    column: its number in the tables above.
    projection: name of the kernel that projects patches.
    tables: names of the fixed positions of encoder and decoder.
    qkv: names of queries, keys and values in a block, or of all three.
    """
    return (
        row("embed.patch_embed.proj.weight", projection, KERNEL),
        *(row(names[0], names[column]) for names in _NAMES),
        *(stored(name, _table(start)) for name, start in zip(tables, ("", "decoder_"), strict=True)),
        *(
            row(f"{block[0]}.attn.qkv.*", [f"{block[column]}.{name}.*" for name in qkv], heads(3, field))
            for field, block in _BLOCKS.items()
        ),
        *(
            row(f"{block[0]}.{names[0]}", f"{block[column]}.{names[column]}")
            for block in _BLOCKS.values()
            for names in _IN_BLOCK
        ),
    )


_AUTHORS = _rows(1, "patch_embed.proj.weight", ("pos_embed", "decoder_pos_embed"), "attn.qkv")
_TRANSFORMERS = _rows(
    2,
    "vit.embeddings.patch_embeddings.projection.weight",
    ("vit.embeddings.position_embeddings", "decoder.decoder_pos_embed"),
    *(f"attention.attention.{word}" for word in ("query", "key", "value")),
)
_FIXED = "the table of positions is left out: it is fixed, and vitpar computes it"
_POSITIONS = ((r"(?:.*\.)?(?:position_embeddings|(?:decoder_)?pos_embed)", _FIXED),)
LIBRARIES = {
    "mae": Library(r"decoder_pred\.weight", _AUTHORS, needless=_POSITIONS),
    "transformers": Library(
        r"decoder\.decoder_pred\.weight",
        _TRANSFORMERS,
        spellings=(
            (r"^vit\.layers\.", "vit.encoder.layer."),
            # upstream: transformers 5.23 saves decoder_layers.0 as decoder_encoder.layer.0.
            (r"^decoder\.decoder_encoder\.layer\.", "decoder.decoder_layers."),
            *((rf"attention\.{x[0]}_proj", f"attention.attention.{x}") for x in ("query", "key", "value")),
            (r"attention\.o_proj", "attention.output.dense"),
            (r"mlp\.fc1", "intermediate.dense"),
            (r"mlp\.fc2", "output.dense"),
        ),
        needless=_POSITIONS,
        usual={"norm_eps": 1e-12},
    ),
}
"""Names by library."""
SETTINGS = (
    *TRANSFORMERS_IMAGES,
    *numbers(decoder_hidden_size="decoder_embed_dim", decoder_num_hidden_layers="decoder_depth"),
    *numbers(decoder_num_attention_heads="decoder_num_heads", mask_ratio="mask_ratio"),
    *numbers(decoder_intermediate_size="decoder_mlp_hidden_dim"),
)
"""Settings of transformers' config.json."""
HEADS = {768: 12, 1024: 16, 1280: 16}
"""Heads of the published encoders by their width. The authors' files do not show them."""


class MAEWeights(Conversion):
    """Conversion of a masked autoencoder's weights."""

    family = MAEConfig
    title = "a masked autoencoder"
    libraries = LIBRARIES
    compared = (
        *("patch_size", "embed_dim", "depth", "num_heads", "mlp_hidden_dim"),
        *("decoder_embed_dim", "decoder_depth", "decoder_num_heads", "decoder_mlp_hidden_dim"),
    )
    writes = ("transformers", "timm")

    def read(self, said: Mapping[str, Any]) -> dict[str, Any]:
        return read_settings(said, SETTINGS, {"hidden_act": "gelu"}) if "model_type" in said else input_size(said)

    def visible(self, size: Sizes, found: Found, known: Mapping[str, Any]) -> dict[str, Any]:
        width, patch = size("embed.patch_embed.proj.weight", 0), size("embed.patch_embed.proj.weight", 3) or 1
        if (num_heads := known.get("num_heads", HEADS.get(width))) is None:
            raise DataError(
                f"the tensors in '{size.place}' do not show the number of heads: name the model with --model, perhaps "
                "mae_vit_base, or use the folder with its config.json"
            )
        tables = [s for name, s in found.shapes.items() if name.endswith(("position_embeddings", "pos_embed"))]
        positions = next((shape[1] for shape in tables if len(shape) == 3 and shape[2] == width), 0)
        image = patch * round((positions - 1) ** 0.5) if positions > 1 else MAEConfig.image_size
        return {
            "image_size": known.get("image_size", image),
            "patch_size": patch,
            "channels": size("embed.patch_embed.proj.weight", 1),
            "embed_dim": width,
            "depth": found.count("blocks"),
            "num_heads": num_heads,
            "mlp_hidden_dim": size("blocks.0.mlp.fc1.weight", 0),
            "decoder_embed_dim": size("dec_embed.proj.weight", 0),
            "decoder_depth": found.count("decoder"),
            "decoder_mlp_hidden_dim": size("decoder.0.mlp.fc1.weight", 0),
        }

    def layers(self, config: MAEConfig) -> dict[str, str]:
        first = config.depth + 1
        decoder = {f"decoder.{index}": block_name(first + index) for index in range(config.decoder_depth)}
        return {**{name: name for name in config.blocks[: config.depth]}, "dec_embed": config.dec_embed, **decoder}

    def export(self, config: MAEConfig, format_name: str) -> Exported:
        """Return ``transformers.ViTMAEForPreTraining``, or timm's encoder with the decoder next to it."""
        if format_name == "transformers":
            settings: dict[str, Any] = {"architectures": ["ViTMAEForPreTraining"], "model_type": "vit_mae"}
            settings |= {**settings_of(config, SETTINGS), "hidden_act": "gelu", "qkv_bias": True}
            return Exported(self.tensors(config, format_name), settings)
        tensors, plain = self.tensors(config, "mae"), ViTWeights().exported(config.encoder, "timm")
        decoder = {name: tensor for name, tensor in tensors.items() if name.startswith(("decoder_", "mask_token"))}
        note = (
            "timm has no decoder of a masked autoencoder: it is in classifier.safetensors, under the names of the "
            "authors' code"
        )
        encoder = {name: tensor for name, tensor in tensors.items() if name not in decoder}
        return Exported(encoder, {**plain.config, "num_classes": 0}, decoder, (*plain.notes, note))
