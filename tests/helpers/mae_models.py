"""A small masked autoencoder, its twin in transformers, and its recipe to check plans with."""

from typing import Any

import torch
from torch import Tensor, nn

from helpers.oracles import transformers
from vitpar import model_config
from vitpar.models.mae.config import MAEConfig

SIZES: dict[str, Any] = {
    "patch_size": 4,
    "image_size": 16,
    "embed_dim": 24,
    "depth": 3,
    "num_heads": 4,
    "mlp_hidden_dim": 40,
}
DECODER: dict[str, Any] = {
    "decoder_embed_dim": 16,
    "decoder_depth": 2,
    "decoder_num_heads": 4,
    "decoder_mlp_hidden_dim": 24,
}


def mae(**options: Any) -> MAEConfig:
    """Return a small masked autoencoder."""
    config = model_config("mae_custom", **{"init": "perturbed", **SIZES, **DECODER, **options})
    assert isinstance(config, MAEConfig)
    return config


def twin(config: MAEConfig, norm_pix_loss: bool = True) -> nn.Module:
    """Return transformers' model."""
    torch.manual_seed(0)
    settings = transformers.ViTMAEConfig(
        hidden_size=config.embed_dim,
        num_hidden_layers=config.depth,
        num_attention_heads=config.num_heads,
        intermediate_size=config.mlp_hidden_dim,
        layer_norm_eps=config.norm_eps,
        image_size=config.image_size,
        patch_size=config.patch_size,
        num_channels=config.channels,
        decoder_num_attention_heads=config.decoder_num_heads,
        decoder_hidden_size=config.decoder_embed_dim,
        decoder_num_hidden_layers=config.decoder_depth,
        decoder_intermediate_size=config.decoder_mlp_hidden_dim,
        mask_ratio=config.mask_ratio,
        norm_pix_loss=norm_pix_loss,
    )
    model = transformers.ViTMAEForPreTraining(settings)
    if model.device.type != "meta":
        # upstream: transformers 5.23 leaves the fixed positions of a new model at zero.
        for table in (model.vit.embeddings.position_embeddings, model.decoder.decoder_pos_embed):
            table.data.copy_(fixed_positions(config, table.shape[-1]))
    return model


def fixed_positions(config: MAEConfig, width: int) -> Tensor:
    """Return the positions of transformers' pretrained models, with the halves that its function swaps."""
    side = config.image_size // config.patch_size
    build = transformers.models.vit_mae.modeling_vit_mae.build_2d_sinusoidal_position_embedding
    rows, columns = build(side, side, width, cls_token=True).chunk(2, dim=-1)
    return torch.cat([columns, rows], dim=-1)[None]
