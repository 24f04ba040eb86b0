"""Layer-wise decay of the learning rate: groups equal timm's."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from helpers.converted import found_in
from helpers.foreign_models import timm_model, timm_swin
from helpers.foreign_weights import TIMM_CONFIG, saved, timm_state
from helpers.oracles import timm
from helpers.plans import TINY_SWIN
from vitpar import model_config
from vitpar.models.layers import LayeredModel
from vitpar.recipe.sections.training import OptimizerSection
from vitpar.training.optim.optimizer import ShardedOptimizer
from vitpar.weights.folder import open_weights
from vitpar.weights.foreign import FAMILIES
from vitpar.weights.importing import import_weights

DECAY, WEIGHT_DECAY = 0.6, 0.3
MODERN = {"img_size": 8, "patch_size": 2, "embed_dim": 48, "depth": 2, "num_heads": 4, "num_classes": 5}
SWIN = {**TINY_SWIN, "drop_path": 0.0}
MODELS: dict[str, Callable[[], nn.Module]] = {
    "class token": lambda: timm_model(timm_state(layer_scale=True, qk_norm=True)),
    "registers": lambda: timm_model(timm_state(registers=2)),
    "distillation": lambda: timm_model(timm_state(dist=True)),
    "mean pooling": lambda: timm_model(timm_state(cls=False), pool="avg"),
    "norm after the mean": lambda: timm.models.eva.Eva(**MODERN, swiglu_mlp=True, scale_mlp=True, use_rot_pos_emb=True),
    "attention pooling": lambda: timm.models.vision_transformer.VisionTransformer(
        **MODERN, global_pool="map", class_token=False
    ),
    "swin": lambda: timm_swin(model_config("swin_custom", **SWIN)),  # type: ignore[arg-type]
}
"""timm's models with random weights."""


def imported(theirs: nn.Module, folder: Path, tensors: dict[str, Tensor]) -> Path:
    """Return the folder to which weights or changes of timm's model are imported, under vitpar's names."""
    config: dict[str, Any] = TIMM_CONFIG
    if "layers.0.blocks.0.norm1.weight" in tensors:
        side = SWIN["image_size"]
        config = {"architecture": "swin_tiny_patch4_window7_224", "pretrained_cfg": {"input_size": [3, side, side]}}
    elif "fc_norm.weight" in tensors:
        config = {**TIMM_CONFIG, "architecture": "eva02_base_patch14_224"}
    elif "attn_pool.latent" not in tensors and "cls_token" not in tensors:
        config = {**TIMM_CONFIG, "global_pool": "avg"}
    import_weights(saved(folder, {name: p.float() for name, p in tensors.items()}, config), folder / "imported")
    return folder / "imported"


def timms_groups(model: nn.Module) -> list[dict[str, Any]]:
    groups: list[dict[str, Any]] = timm.optim.param_groups_layer_decay(
        model, weight_decay=WEIGHT_DECAY, no_weight_decay_list=model.no_weight_decay(), layer_decay=DECAY
    )
    return groups


@pytest.mark.parametrize("kind", MODELS)
def test_groups_equal_timms(kind: str, tmp_path: Path) -> None:
    """Every parameter has timm's factor of the learning rate and timm's weight decay; no two groups are alike."""
    theirs = MODELS[kind]()
    config = open_weights(imported(theirs, tmp_path, dict(theirs.named_parameters()))).config
    foreign = dict(theirs.named_parameters())
    parts = FAMILIES[config.FAMILY].parts(found_in(foreign, config), config)
    of_timm = {
        id(p): (group["lr_scale"], group["weight_decay"]) for group in timms_groups(theirs) for p in group["params"]
    }
    expected = {ours: of_timm[id(foreign[part.names[0]])] for ours, part in parts.items()}

    model = LayeredModel(config)
    settings = OptimizerSection(layer_decay=DECAY, weight_decay=WEIGHT_DECAY)
    optimizer = ShardedOptimizer(model.named_parameters(), settings, layers_above=config.layers_above)
    names = {p.data_ptr(): name for name, p in model.named_parameters()}
    groups = optimizer.torch_optimizer.param_groups
    mine = {
        names[p.data_ptr()]: (group["lr_scale"], group["weight_decay"]) for group in groups for p in group["params"]
    }
    if kind == "attention pooling":  # a token, which does not decay here; timm lets it
        mine["head.attn_pool.latent"] = (1.0, WEIGHT_DECAY)
    assert mine == expected
    assert len(groups) == len(timms_groups(theirs)) == len(set(expected.values()))
