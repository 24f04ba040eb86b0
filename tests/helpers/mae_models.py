"""A small masked autoencoder, its twin in transformers, and its recipe to check plans with."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from helpers.converted import converted
from helpers.oracles import transformers
from vitpar import model_config
from vitpar.models.layers import LayeredModel
from vitpar.models.mae.config import MAEConfig
from vitpar.weights.foreign import FAMILIES

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
    settings = {**FAMILIES["mae"].exported(config, "transformers").config, "norm_pix_loss": norm_pix_loss}
    model = transformers.ViTMAEForPreTraining(transformers.ViTMAEConfig.from_dict(settings))
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


@torch.no_grad()
def filled(config: MAEConfig, state: Mapping[str, Tensor]) -> LayeredModel:
    """Return a model in float64 with the parameters of transformers' `state`."""
    model, values = LayeredModel(config).double(), converted(state, config)
    for name, parameter in model.named_parameters():
        parameter.copy_(values.pop(name))
    assert not values
    for layer in model.layers().values():
        layer.reset_buffers()
    return model
