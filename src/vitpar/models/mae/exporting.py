"""Export of a masked autoencoder's parameters: as transformers has it, or its encoder as timm's Vision Transformer.

It undoes ``vitpar.models.mae.foreign``: what was exported for transformers can be imported again.
"""

from __future__ import annotations

from dataclasses import replace

from vitpar.models.exporting import Tensors, alone, linear, patches
from vitpar.models.foreign import Exported, ExportedTensor
from vitpar.models.mae.config import MAEConfig
from vitpar.models.mae.layers import positions_with_class
from vitpar.models.vit.config import ViTConfig
from vitpar.models.vit.export_parts import queries
from vitpar.models.vit.to_timm import to_timm


def exported(config: MAEConfig, format_name: str) -> Exported:
    """Return the model as ``transformers.ViTMAEForPreTraining`` has it, or as timm and the authors' code name it."""
    return _transformers(config) if format_name == "transformers" else _timm(config)


def _table(c: MAEConfig, width: int) -> ExportedTensor:
    """Return the fixed positions, with those of the class token, which are 0."""
    return ExportedTensor((), lambda: positions_with_class(c, width))


def _transformers(c: MAEConfig) -> Exported:
    tensors = patches("vit.embeddings.patch_embeddings.projection", c.channels, c.patch_size)
    tensors["vit.embeddings.cls_token"] = alone("embed.cls_token")
    tensors["vit.embeddings.position_embeddings"] = _table(c, c.embed_dim)
    for index in range(c.depth):
        tensors |= _block(c.encoder, f"vit.encoder.layer.{index}", f"blocks.{index}")
    tensors |= linear("vit.layernorm", f"{c.dec_embed}.norm")
    tensors |= linear("decoder.decoder_embed", f"{c.dec_embed}.proj")
    tensors["decoder.mask_token"] = alone(f"{c.dec_embed}.mask_token")
    tensors["decoder.decoder_pos_embed"] = _table(c, c.decoder_embed_dim)
    for index in range(c.decoder_depth):
        tensors |= _block(c.decoder, f"decoder.decoder_layers.{index}", f"blocks.{c.depth + 1 + index}")
    tensors |= linear("decoder.decoder_norm", "head.norm") | linear("decoder.decoder_pred", "head.fc")
    return Exported(
        tensors,
        {
            "architectures": ["ViTMAEForPreTraining"],
            "model_type": "vit_mae",
            "hidden_size": c.embed_dim,
            "num_hidden_layers": c.depth,
            "num_attention_heads": c.num_heads,
            "intermediate_size": c.mlp_hidden_dim,
            "hidden_act": "gelu",
            "layer_norm_eps": c.norm_eps,
            "image_size": c.image_size,
            "patch_size": c.patch_size,
            "num_channels": c.channels,
            "qkv_bias": True,
            "decoder_hidden_size": c.decoder_embed_dim,
            "decoder_num_hidden_layers": c.decoder_depth,
            "decoder_num_attention_heads": c.decoder_num_heads,
            "decoder_intermediate_size": c.decoder_mlp_hidden_dim,
            "mask_ratio": c.mask_ratio,
        },
    )


def _block(c: ViTConfig, theirs: str, ours: str) -> Tensors:
    tensors = linear(f"{theirs}.layernorm_before", f"{ours}.norm1")
    tensors |= queries(c, f"{theirs}.attention.attention", ("query", "key", "value"), f"{ours}.attn")
    tensors |= linear(f"{theirs}.attention.output.dense", f"{ours}.attn.proj")
    tensors |= linear(f"{theirs}.layernorm_after", f"{ours}.norm2")
    tensors |= linear(f"{theirs}.intermediate.dense", f"{ours}.mlp.fc1")
    return tensors | linear(f"{theirs}.output.dense", f"{ours}.mlp.fc2")


def _timm(c: MAEConfig) -> Exported:
    """Return the encoder as timm's Vision Transformer without classifier, and the decoder in a file next to it."""
    plain = to_timm(c.encoder)
    tensors = {name: tensor for name, tensor in plain.tensors.items() if not name.startswith(("head.", "norm."))}
    tensors |= {"pos_embed": _table(c, c.embed_dim), **linear("norm", f"{c.dec_embed}.norm")}
    decoder: Tensors = {
        "mask_token": alone(f"{c.dec_embed}.mask_token"),
        "decoder_pos_embed": _table(c, c.decoder_embed_dim),
        **linear("decoder_embed", f"{c.dec_embed}.proj"),
        **linear("decoder_norm", "head.norm"),
        **linear("decoder_pred", "head.fc"),
    }
    for name, tensor in to_timm(c.decoder).tensors.items():
        if name.startswith("blocks."):
            _, index, rest = name.split(".", 2)
            ours = tuple(
                part.replace(f"blocks.{index}.", f"blocks.{c.depth + 1 + int(index)}.") for part in tensor.names
            )
            decoder[f"decoder_blocks.{index}.{rest}"] = replace(tensor, names=ours)
    note = (
        "timm has no decoder of a masked autoencoder: it is in classifier.safetensors, under the names of the authors' "
        "code"
    )
    return Exported(tensors, {**plain.config, "num_classes": 0}, decoder, (*plain.notes, note))
