"""Weights folders with the parameters of a model."""

import json
from pathlib import Path

from vitpar.models import ModelConfig, config_to_json
from vitpar.models.layers import LayeredModel
from vitpar.weights.folder import Weights, open_weights, write_weights

RECIPE = '[data]\nmean = [0.1, 0.2, 0.3]\nstd = [0.4, 0.5, 0.6]\ninterpolation = "bilinear"\ncrop_pct = 0.9\n'


def weights_of(model: LayeredModel, config: ModelConfig, folder: Path) -> Weights:
    """Write a weights folder with the parameters of `model`, and open it."""
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    write_weights(
        folder,
        {name: p.nbytes for name, p in parameters.items()},
        parameters.__getitem__,
        others={"config.json": json.dumps(config_to_json(config)), "recipe.toml": RECIPE},
        shard_bytes=10**9,
    )
    return open_weights(folder)
