"""Layer-wise decay of the learning rate: groups and training equal timm's groups with torch's optimizers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from helpers.foreign_models import timm_model, timm_swin
from helpers.foreign_weights import TIMM_CONFIG, saved, timm_state
from helpers.oracles import timm
from helpers.ranks import RankPool
from helpers.sharded_parameters import whole
from helpers.swin_plans import TINY
from vitpar import Execution, load_weights, model_config, parallelize, parse, validate
from vitpar.models.layers import LayeredModel
from vitpar.models.swin import foreign as swin
from vitpar.models.swin.config import SwinConfig
from vitpar.models.vit import foreign as vit
from vitpar.training.optim.optimizer import ShardedOptimizer
from vitpar.training.recipe.sections import OptimizerSection
from vitpar.weights.folder import open_weights
from vitpar.weights.importing import import_weights

DECAY, WEIGHT_DECAY = 0.6, 0.3
BATCH = 8
RATES = (0.02, 0.05, 0.03)
MODERN = {"img_size": 8, "patch_size": 2, "embed_dim": 48, "depth": 2, "num_heads": 4, "num_classes": 5}
SWIN = {**TINY, "drop_path": 0.0}
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
        config = {
            "architecture": "swin_tiny_patch4_window7_224",
            "pretrained_cfg": {"input_size": [3, side, side]},
        }
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
    family: Any = swin if isinstance(config, SwinConfig) else vit
    found = family.renamed({name: tuple(p.shape) for name, p in theirs.named_parameters()})
    assert found is not None
    foreign = dict(theirs.named_parameters())
    of_timm = {
        id(p): (group["lr_scale"], group["weight_decay"]) for group in timms_groups(theirs) for p in group["params"]
    }
    expected = {ours: of_timm[id(foreign[part.names[0]])] for ours, part in family.parts(found, config).items()}

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


def trained(device: torch.device, mesh: str, folder: Path, settings: dict[str, Any], images: Tensor) -> dict[str, Any]:
    """Return the complete parameters that this rank holds, after one step per rate in RATES; runs on every rank."""
    config = open_weights(folder).config
    plan = validate(parse(mesh), config, BATCH)
    model = parallelize(config, plan, Execution(BATCH, precision="fp64"), device)
    load_weights(model, folder)
    section = OptimizerSection(layer_decay=DECAY, weight_decay=WEIGHT_DECAY, **settings)
    optimizer = ShardedOptimizer(model.named_parameters(), section, layers_above=config.layers_above)
    for rate in RATES:
        mine = images[model.image_rows(BATCH)] if model.takes_images else None
        model.forward_backward(mine, torch.arange(BATCH) % config.num_classes)
        optimizer.step(rate)
    return {name: whole(p).numpy() for name, p in model.named_parameters()}


def oracle(theirs: nn.Module, settings: dict[str, Any], images: Tensor, classes: int) -> dict[str, Tensor]:
    """Train timm's model with timm's groups and torch's optimizer; return its parameters by timm's names."""
    theirs = theirs.double()
    groups = timms_groups(theirs)
    kind = torch.optim.AdamW if settings["name"] == "adamw" else torch.optim.SGD
    optimizer = kind(groups, lr=1.0, foreach=False, **{k: v for k, v in settings.items() if k != "name"})
    for rate in RATES:
        for group in optimizer.param_groups:
            group["lr"] = rate * group["lr_scale"]
        F.cross_entropy(theirs(images), torch.arange(BATCH) % classes).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach() for name, p in theirs.named_parameters()}


@pytest.mark.parametrize("settings", [{"name": "sgd", "momentum": 0.9}, {"name": "adamw", "eps": 1e-3}], ids=str)
@pytest.mark.parametrize(
    ("kind", "mesh"),
    [
        ("mean pooling", "tp2"),
        ("class token", "pp2xfsdp2"),
        ("registers", "dp2+zero1"),
        ("swin", "tp2"),
        ("swin", "pp2: stage1=dp2, stage2=tp2+sp, *=fsdp2"),
    ],
)
def test_training_equals_timms_groups_with_torchs_optimizer(
    kind: str, mesh: str, settings: dict[str, Any], tmp_path: Path, ranks: Callable[[int], RankPool]
) -> None:
    theirs = MODELS[kind]()
    start = {name: p.detach().clone() for name, p in theirs.named_parameters()}
    folder = imported(theirs, tmp_path / "begin", start)
    weights = open_weights(folder)
    config = weights.config
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(BATCH, 3, config.image_size, config.image_size, generator=generator, dtype=torch.float64)
    after = open_weights(imported(theirs, tmp_path / "end", oracle(theirs, settings, images, config.num_classes)))
    seen = set()
    for found in ranks(parse(mesh).world_size).run(trained, mesh, folder, settings, images):
        seen |= found.keys()
        for name, value in found.items():
            before, expected = weights.read(name), after.read(name)
            moved, wanted = torch.from_numpy(value) - before, expected - before
            error = (moved - wanted).abs().max().item()
            # The import rounds both sides to float32.
            assert error <= 1e-4 * wanted.abs().max().item() + 1e-6 * before.abs().max().item(), name
            # Attention does not depend on the bias of keys' norms: softmax ignores what all scores share.
            assert wanted.abs().max() > 0 or name.endswith("k_norm.bias"), name
    assert seen == {f"{layer}.{key}" for layer, d in config.layers.items() for key in d.parameters}
