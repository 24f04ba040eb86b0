"""Costs and origin of predictions for tests of the planner's reports."""

from typing import Any

from vitpar.models import model_config
from vitpar.planner.cost.layer import LayerCosts
from vitpar.planner.profile.cluster import find_cluster
from vitpar.planner.profile.estimate import estimate_model, tensors

CONFIG = model_config("vit_small_patch16_224")
ORIGIN = {"vitpar": "1.2.3", "command": "vitpar search --cluster 8xH100"}


def costs_of(**changed: Any) -> LayerCosts:
    hardware = find_cluster("8xH100").hardware()
    model = estimate_model(CONFIG, "bf16", hardware, tensors(CONFIG, 8))
    return LayerCosts(CONFIG, hardware, model.model_copy(update=changed))
