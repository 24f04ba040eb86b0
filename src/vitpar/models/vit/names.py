"""A Vision Transformer's tensors in other libraries: rows of names and how the tensors differ.

- **timm**: ``vision_transformer.py``, ``deit.py`` and ``eva.py`` (1.0), which includes the files of DeiT, DeiT III, the
  original ViT and ViT-5 (github.com/wangf3014/ViT-5).
- **transformers**: ViT, DeiT, DINOv2 with and without registers, DINOv3 and the image towers of SigLIP (4 and 5). The
  rows leave out the model's name and the encoder's, which ``vitpar.models.vit.exports`` adds.

What rows cannot say is in `special`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from vitpar.models import rows
from vitpar.models.convert import Conversion, Exported, Sizes
from vitpar.models.rows import GATES, KERNEL, SAME, TABLE, Packing, Row, heads, never, only_read, row, stored
from vitpar.models.vit.config import ViTConfig
from vitpar.models.vit.exports import is_eva, kind, timm, transformers
from vitpar.models.vit.layers import sincos_2d
from vitpar.models.vit.settings import infer, said_by

_FC1 = Packing(
    lambda c, one: (GATES if c.gates == 2 else SAME).pack(c, one),
    lambda c, one: (GATES if c.gates == 2 else SAME).unpack(c, one),
)
"""The first layer of an MLP, whose rows are gates and values if it has gates."""
_POSITIONS = Packing(lambda c, table: table if table.dim() == 3 else table[None], lambda c, table: table)


def _rows_of_parallel(c: ViTConfig, tensor: Tensor) -> Tensor:
    """Order (MLP | q | k | v) by heads, and the MLP by gates."""
    hidden, *three = tensor.split([c.gates * c.mlp_hidden_dim, *[c.embed_dim] * 3])
    hidden = rearrange(hidden, "(gates h) ... -> (h gates) ...", gates=c.gates)
    pieces = [rearrange(piece, "(h d) ... -> h d ...", h=c.num_heads) for piece in (*three, hidden)]
    return torch.cat(pieces, dim=1).flatten(0, 1)


def _columns_of_parallel(c: ViTConfig, *tensors: Tensor) -> Tensor:
    """Order (attention | MLP) by heads."""
    both = torch.cat(tensors, dim=1).split([c.embed_dim, c.mlp_hidden_dim], dim=1)
    return torch.cat([rearrange(part, "o (h d) -> o h d", h=c.num_heads) for part in both], dim=2).flatten(1)


def _read(pack: Callable[..., Tensor]) -> Any:
    """Return the packing of a row that is only read."""
    return {"packing": Packing(pack, only_read), "written": never}


_SINCOS = stored(
    "pos_embed",
    lambda c: sincos_2d(c.image_size // c.patch_size, c.image_size // c.patch_size, c.embed_dim)[None],
    written=lambda c: c.position == "sincos2d",
)
_B = "blocks.{}"
_TIMM: tuple[Row, ...] = (
    row("embed.patch_embed.proj.weight", "patch_embed.proj.weight", KERNEL),
    row("embed.patch_embed.proj.bias", "patch_embed.proj.bias"),
    *(row(f"embed.{name}", name) for name in ("cls_token", "dist_token", "reg_token")),
    row("embed.pos_embed", "pos_embed", _POSITIONS),
    _SINCOS,
    *(row(f"{_B}.{name}.*", f"{_B}.{name}.*") for name in ("norm1", "norm2", "attn.proj", "attn.norm", "mlp.norm")),
    *(row(f"{_B}.attn.{name}.*", f"{_B}.attn.{name}.*") for name in ("q_norm", "k_norm")),
    row(f"{_B}.attn.qkv.*", f"{_B}.attn.qkv.*", heads(3)),
    row(f"{_B}.attn.qkv.*", [f"{_B}.attn.{x}_proj.*" for x in "qkv"], heads(3), written=never),
    *(row(f"{_B}.attn.{x}_bias", f"{_B}.attn.{x}_bias") for x in "qv"),
    *(row(f"{_B}.attn.{x}_bias", f"{_B}.attn.{x}_proj.bias", written=never) for x in "qv"),
    row(
        f"{_B}.mlp.fc1.*",
        [f"{_B}.mlp.fc1_{x}.*" for x in "gx"],
        GATES,
        written=lambda c: is_eva(c) and c.mlp_norm and c.gates == 2,
    ),
    row(f"{_B}.mlp.fc1.*", f"{_B}.mlp.fc1.*", _FC1),
    row(f"{_B}.mlp.fc2.*", f"{_B}.mlp.fc2.*"),
    *(row(f"{_B}.ls{n}.gamma", f"{_B}.gamma_{n}", written=is_eva) for n in (1, 2)),
    *(row(f"{_B}.ls{n}.gamma", f"{_B}.ls{n}.gamma") for n in (1, 2)),
    # Parallel blocks
    row(f"{_B}.ls1.gamma", f"{_B}.ls.gamma", written=never),
    row(f"{_B}.norm1.*", f"{_B}.in_norm.*", written=never),
    *(row(f"{_B}.{name}.*", f"{_B}.{name}.*", written=never) for name in ("q_norm", "k_norm")),
    row(f"{_B}.in_proj.*", f"{_B}.in_proj.*", **_read(_rows_of_parallel)),
    row(
        f"{_B}.mlp_bias",
        f"{_B}.mlp_bias",
        **_read(lambda c, bias: rearrange(bias, "(gates h) -> (h gates)", gates=c.gates)),
    ),
    row(f"{_B}.out_proj.weight", [f"{_B}.{x}_out_proj.weight" for x in ("attn", "mlp")], **_read(_columns_of_parallel)),
    row(f"{_B}.out_proj.bias", [f"{_B}.{x}_out_proj.bias" for x in ("attn", "mlp")], **_read(lambda c, a, b: a + b)),
    row("head.norm.*", "fc_norm.*", written=lambda c: c.fc_norm),
    row("head.norm.*", "norm.*"),
    row("head.attn_pool.kv.*", "attn_pool.kv.*", heads(2)),
    *(row(f"head.attn_pool.{name}.*", f"attn_pool.{name}.*") for name in ("q", "proj", "norm", "mlp.fc1", "mlp.fc2")),
    row("head.attn_pool.latent", "attn_pool.latent"),
    row("head.representation.*", "pre_logits.fc.*", written=never),
    row("head.fc.*", "head.*"),
    row("head.fc_dist.*", "head_dist.*"),
)


def _of(*kinds: str, gates: bool = False) -> Callable[[ViTConfig], bool]:
    """Return whether a model has one of transformers' types. gates: whether its MLP must have gates."""
    return lambda c: kind(c) in kinds and (not gates or c.gates == 2)


_KINDS = (("vit", "deit"), ("dinov2", "dinov2_with_registers"), ("dinov3_vit",), ("siglip", "siglip_vision_model"))
"""Types of transformers' models that name tensors alike."""
_DINOV2, _DINOV3, _SIGLIP = (_of(*kinds) for kinds in _KINDS[1:])
_DINO = _of(*_KINDS[1], *_KINDS[2])


def _rows(ours: str, theirs: Iterable[str | Sequence[str]], packing: Packing = SAME) -> tuple[Row, ...]:
    """Return the rows of a parameter. theirs: names for each of `_KINDS`."""
    return tuple(row(ours, name, packing, written=_of(*kinds)) for name, kinds in zip(theirs, _KINDS, strict=True))


def _first_register(c: ViTConfig) -> bool:
    """Return whether transformers' class token, which its DINOv3 has in any case, is the first register."""
    return kind(c) == "dinov3_vit" and c.pool != "cls"


CLASS_POSITION = Packing(
    lambda c, token, table: (token + table[:, :1], table[:, 1:]),
    lambda c, token, table: (token, torch.cat([torch.zeros_like(table[:, :1]), table], dim=1)),
)
"""A class token whose position is a part of the token itself, and the positions of the patches."""
_POOL_QUERY = Packing(
    lambda c, qkv: (qkv[: c.embed_dim], heads(2).pack(c, qkv[c.embed_dim :])),
    lambda c, q, kv: (q, *heads(2).unpack(c, kv)),
)
"""Queries, keys and values of attention pooling in one tensor."""
_L = "layer.{}"
_PATCHES = ("patch_embeddings.projection", "patch_embeddings.projection", "patch_embeddings", "patch_embedding")
_WORDS = [f"attention.attention.{word}" for word in ("query", "key", "value")]
_QKV = (_WORDS, _WORDS, [f"attention.{x}_proj" for x in "qkv"], [f"self_attn.{x}_proj" for x in "qkv"])
_IN_BLOCK = {
    "norm1": ("layernorm_before", "norm1", "norm1", "layer_norm1"),
    "norm2": ("layernorm_after", "norm2", "norm2", "layer_norm2"),
    "attn.proj": ("attention.output.dense", "attention.output.dense", "attention.o_proj", "self_attn.out_proj"),
    "mlp.fc1": ("intermediate.dense", "mlp.fc1", "mlp.up_proj", "mlp.fc1"),
    "mlp.fc2": ("output.dense", "mlp.fc2", "mlp.down_proj", "mlp.fc2"),
}
_GATED = _of("dinov2", "dinov2_with_registers", gates=True)
_TRANSFORMERS: tuple[Row, ...] = (
    *_rows("embed.patch_embed.proj.weight", (f"embeddings.{name}.weight" for name in _PATCHES), KERNEL),
    *_rows("embed.patch_embed.proj.bias", (f"embeddings.{name}.bias" for name in _PATCHES)),
    row("embed.cls_token", "embeddings.cls_token", written=lambda c: kind(c) != "dinov2_with_registers"),
    row("embed.dist_token", "embeddings.distillation_token", written=_of("deit")),
    row("embed.reg_token", "embeddings.register_tokens", written=lambda c: _DINO(c) and not _first_register(c)),
    row("embed.pos_embed", "embeddings.position_embeddings", _POSITIONS, written=_of("vit", "deit", "dinov2")),
    row("embed.pos_embed", "embeddings.position_embedding.weight", TABLE, written=_SIGLIP),
    Row(
        ("embed.cls_token", "embed.pos_embed"),
        ("embeddings.cls_token", "embeddings.position_embeddings"),
        CLASS_POSITION,
        _of("dinov2_with_registers"),
    ),
    Row(
        ("embed.reg_token",),
        ("embeddings.cls_token", "embeddings.register_tokens"),
        Packing(lambda c, *tokens: torch.cat(tokens, 1), lambda c, tokens: (tokens[:, :1], tokens[:, 1:])),
        _first_register,
    ),
    stored(
        "embeddings.register_tokens",
        lambda c: torch.zeros(1, 0, c.embed_dim),
        written=lambda c: _DINOV3(c) and not c.num_reg_tokens,
    ),
    stored("embeddings.mask_token", lambda c: torch.zeros(1, c.embed_dim), written=_DINOV2),
    stored("embeddings.mask_token", lambda c: torch.zeros(1, 1, c.embed_dim), written=_DINOV3),
    *_rows(f"{_B}.attn.qkv.*", ([f"{_L}.{name}.*" for name in names] for names in _QKV), heads(3)),
    *(row(f"{_B}.attn.{x}_bias", f"{_L}.attention.{x}_proj.bias") for x in "qv"),
    *(row(f"{_B}.ls{n}.gamma", f"{_L}.layer_scale{n}.lambda1", written=_DINO) for n in (1, 2)),
    row(
        f"{_B}.mlp.fc1.*",
        [f"{_L}.mlp.{x}_proj.*" for x in ("gate", "up")],
        GATES,
        written=_of("dinov3_vit", gates=True),
    ),
    row(f"{_B}.mlp.fc1.*", f"{_L}.mlp.weights_in.*", GATES, written=_GATED),
    row(f"{_B}.mlp.fc2.*", f"{_L}.mlp.weights_out.*", written=_GATED),
    *(
        one
        for ours, names in _IN_BLOCK.items()
        for one in _rows(f"{_B}.{ours}.*", (f"{_L}.{name}.*" for name in names))
    ),
    *_rows("head.norm.*", ("layernorm.*", "layernorm.*", "norm.*", "post_layernorm.*")),
    row("head.attn_pool.latent", "head.probe", written=_SIGLIP),
    Row(("head.attn_pool.q.*", "head.attn_pool.kv.*"), ("head.attention.in_proj_*",), _POOL_QUERY),
    row("head.attn_pool.proj.*", "head.attention.out_proj.*"),
    row("head.attn_pool.norm.*", "head.layernorm.*"),
    *(row(f"head.attn_pool.{name}.*", f"head.{name}.*") for name in ("mlp.fc1", "mlp.fc2")),
    row("head.fc.*", "cls_classifier.*", written=_of("deit")),
    row("head.fc.*", "classifier.*"),
    row("head.fc_dist.*", "distillation_classifier.*"),
)
_NO_MASK = "the mask token is dropped: it is for pretraining only"
_NO_DECODER = "the decoder is dropped: it is for pretraining only"
_MODEL = r"(?:(?:vit|deit|dinov2|dinov2_with_registers|dinov3_vit|vision_model|model)\.)?"
LIBRARIES = {
    "timm": rows.Library(
        r"patch_embed\.proj\.weight",
        _TIMM,
        needless=(
            (r"blocks\.\d+\.attn\.rope(?:_reg)?\.freqs", ""),
            (r"mask_token", _NO_MASK),
            (r"decoder_.*|decoder\..*", _NO_DECODER),
        ),
    ),
    "transformers": rows.Library(
        rf"{_MODEL}embeddings\.patch_embeddings?(?:\.projection)?\.weight",
        _TRANSFORMERS,
        spellings=((rf"^{_MODEL}", ""), (r"^(?:encoder\.layers?|model\.layer|layers)\.", "layer.")),
        needless=(
            (rf"{_MODEL}pooler\.dense\..+", "the pooler is dropped, since no classifier of transformers uses it"),
            (rf"{_MODEL}embeddings\.mask_token", _NO_MASK),
            (r"decoder\..*", _NO_DECODER),
            (r"text_model\..*|logit_(?:scale|bias)", "the text tower is dropped: only the image tower is imported"),
            (rf"{_MODEL}(?:embeddings\.position_ids|rope_embeddings\.inv_freq)", ""),
        ),
        usual={"norm_eps": 1e-12},
    ),
}
"""Names by library."""


class ViTWeights(Conversion):
    """Conversion of a Vision Transformer's weights."""

    family = ViTConfig
    title = "a ViT"
    libraries = LIBRARIES
    compared = ("patch_size", "embed_dim", "depth", "num_heads", "mlp_hidden_dim")
    writes = ("timm", "transformers")

    def visible(self, size: Sizes, found: rows.Found, known: Mapping[str, Any]) -> dict[str, Any]:
        return infer(size, found, known)

    def read(self, said: Mapping[str, Any]) -> dict[str, Any]:
        return said_by(said)

    def export(self, config: ViTConfig, format_name: str) -> Exported:
        return (timm if format_name == "timm" else transformers)(self, config)

    def complete(self, found: rows.Found) -> rows.Found:
        """Drop a classifier of transformers' DINOv2 that reads the class token and the mean of the patches."""
        shapes = {name: found.shapes[theirs[0]] for name, theirs in found.names.items()}
        width, classifier = shapes.get("embed.patch_embed.proj.weight", ())[:1], shapes.get("head.fc.weight", ())
        if found.format != "transformers" or not width or classifier[1:] != (2 * width[0],):
            return found
        note = "the classifier is dropped: it reads the class token and the mean of the patches, vitpar's only one"
        links = tuple(link for link in found.links if link.ours[0] not in ("head.fc.weight", "head.fc.bias"))
        return replace(found, links=links, notes=(*found.notes, note))

    def special(self, found: rows.Found, config: ViTConfig) -> tuple[Row, ...]:
        """Return the links of tokens that vitpar's model has in another way.

        Tokens that the head does not read become registers: a class token under mean pooling, or a distillation token
        without a classifier. The position of transformers' class token becomes a part of it if vitpar's has none.
        """
        by_name = {link.ours[0]: link for link in found.links}
        unread = [
            *(["embed.cls_token"] if config.pool != "cls" else []),
            *(["embed.dist_token"] if not config.distillation else []),
        ]
        if tokens := [by_name.pop(name) for name in unread if name in by_name]:
            tokens += [by_name.pop("embed.reg_token")] if "embed.reg_token" in by_name else []
            names = tuple(link.theirs[0] for link in tokens)
            joined = Packing(lambda c, *tensors: torch.cat(tensors, dim=1), only_read)
            by_name["embed.reg_token"] = Row(("embed.reg_token",), names, joined)
        elif not config.num_reg_tokens:  # transformers has an empty tensor
            by_name.pop("embed.reg_token", None)
        token, table = by_name.get("embed.cls_token"), by_name.get("embed.pos_embed")
        if token and table and not config.prefix_positions and found.shapes[table.theirs[0]][-2] == config.patches + 1:
            both = ("embed.cls_token", "embed.pos_embed")
            by_name["embed.cls_token"] = Row(both, (*token.theirs, *table.theirs), CLASS_POSITION)
            del by_name["embed.pos_embed"]
        return tuple(by_name.values())
