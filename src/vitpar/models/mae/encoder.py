"""Encoder of a masked autoencoder as a Vision Transformer, to fine-tune it."""

from __future__ import annotations

from vitpar.models.mae.config import MAEConfig
from vitpar.models.mae.layers import positions_with_class
from vitpar.models.rows import MadeTensor


def encoder_parameters(config: MAEConfig) -> dict[str, MadeTensor]:
    """Return the parameters of `MAEConfig.encoder`, by name, made of the autoencoder's; a classifier is not among them.

    The fixed positions become learned ones.
    """
    same = [name for name in config.encoder.layer_names if name != "head"]
    names = {f"{layer}.{name}" for layer in same for name in config.encoder.layers[layer].parameters}
    tensors = {name: MadeTensor((name,)) for name in names if name != "embed.pos_embed"}
    tensors["embed.pos_embed"] = MadeTensor((), lambda: positions_with_class(config, config.embed_dim))
    for end in ("weight", "bias"):
        tensors[f"head.norm.{end}"] = MadeTensor((f"{config.dec_embed}.norm.{end}",))
    return tensors
