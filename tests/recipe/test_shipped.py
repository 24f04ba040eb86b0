"""Shipped recipes against their sources: rates, parameter groups and losses by timm's and torch's code."""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR

from helpers.oracles import timm
from vitpar.errors import RecipeError
from vitpar.models.layers import LayeredModel
from vitpar.planner.training_time import gpu_hours
from vitpar.recipe.file import ShippedRecipe, shipped_recipe, shipped_recipes
from vitpar.recipe.rates.schedules import Schedules
from vitpar.tasks import task_of
from vitpar.training.optim.optimizer import ShardedOptimizer

RECIPES = {one.name: one for one in shipped_recipes()}


@dataclass(frozen=True)
class Source:
    """Options of timm's kind of training script. Rates are for `batch` images."""

    model: str
    batch: int
    lr: float
    epochs: int
    weight_decay: float
    warmup_epochs: int = 5
    warmup_lr: float = 1e-6
    min_lr: float = 1e-5
    smoothing: float = 0.0
    bce: bool = False
    layer_decay: float | None = None
    opt: str = "adamw"
    clip: float = 0.0
    augment: dict[str, Any] = field(default_factory=dict)
    """Settings [augment]; mixup 0.8 and CutMix 1 in addition."""


RAND, ERASED = {"policy": "rand-m9-mstd0.5-inc1"}, {"policy": "rand-m9-mstd0.5-inc1", "random_erasing": 0.25}
THREE = {"policy": "3a", "color_jitter": (0.3, 0.3, 0.3), "repeats": 3}
REVENGE: dict[str, Any] = {"opt": "lamb", "clip": 1.0, "bce": True, "augment": THREE}
SOURCES = {
    # deit/main.py: lr 5e-4 for 512 images, and its defaults
    "deit_small": Source(
        "deit_small_patch16_224", 1024, 5e-4 * 2, 300, 0.05, smoothing=0.1, augment={**ERASED, "repeats": 3}
    ),
    "deit_small_distilled": Source(
        "deit_small_distilled_patch16_224", 1024, 5e-4 * 2, 300, 0.05, smoothing=0.1, augment={**ERASED, "repeats": 3}
    ),
    # deit/README_revenge.md: --batch 256 on 8 GPUs, 64 on 32
    "deit3_small": Source("deit3_small_patch16_224", 256 * 8, 4e-3, 800, 0.05, **REVENGE),
    "deit3_base": Source("deit3_base_patch16_224", 256 * 8, 3e-3, 800, 0.05, **REVENGE),
    "deit3_large": Source("deit3_large_patch16_224", 64 * 32, 3e-3, 800, 0.05, **REVENGE),
    "deit3_finetune": Source("deit3_base_patch16_224", 64 * 8, 1e-5, 20, 0.1, smoothing=0.1, augment=RAND),
    # ViT-5/README.md
    "vit5_small": Source("deit3_small_patch16_224", 256 * 8, 4e-3, 800, 0.05, **REVENGE),
    # Compact-Transformers/configs/datasets/cifar10.yml
    "cifar10_vit_lite": Source(
        *("vit_tiny_patch16_224", 128, 55e-5, 200, 6e-2),
        **{"warmup_epochs": 10, "warmup_lr": 1e-5, "smoothing": 0.1, "augment": ERASED},
    ),
    # mae/FINETUNE.md: --blr 5e-4 for 256 images
    "mae_finetune_base": Source(
        "vit_base_patch16_224", 1024, 5e-4 * 4, 100, 0.05, min_lr=1e-6, smoothing=0.1, layer_decay=0.65, augment=ERASED
    ),
}


def rates(shipped: ShippedRecipe) -> Iterator[tuple[int, float]]:
    """Yield the first steps of epochs, and some within them, from 0, with their rates."""
    recipe, samples = shipped.recipe(), shipped.about.samples
    schedule, steps = recipe.learning_rate(samples), recipe.total_steps(samples)
    epoch = samples / recipe.train.batch_size
    for number in range(min(200, math.floor(steps / epoch))):
        for step in (math.ceil(number * epoch), math.ceil((number + 0.5) * epoch)):
            yield step, schedule(step + 1)


def epoch_of(shipped: ShippedRecipe, step: int) -> float:
    return step * shipped.recipe().train.batch_size / shipped.about.samples


@pytest.mark.parametrize("name", [name for name in SOURCES if name != "mae_finetune_base"])
def test_rates_equal_timms_scheduler(name: str) -> None:
    source, shipped = SOURCES[name], RECIPES[name]
    held = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=source.lr)
    scheduler = timm.scheduler.CosineLRScheduler(
        *(held, source.epochs, source.min_lr), **{"warmup_t": source.warmup_epochs, "warmup_lr_init": source.warmup_lr}
    )
    for step, rate in rates(shipped):
        scheduler.step(math.floor(epoch_of(shipped, step)))
        assert rate == pytest.approx(held.param_groups[0]["lr"], rel=1e-6), step


def test_rates_equal_those_of_the_other_sources() -> None:
    source = SOURCES["mae_finetune_base"]
    for step, rate in rates(RECIPES["mae_finetune_base"]):  # mae/util/lr_sched.py; its first step has rate 0
        epoch = epoch_of(RECIPES["mae_finetune_base"], step + (step < 5 * 1_281_167 / 1024))
        falls = source.min_lr + (source.lr - source.min_lr) * (1 + math.cos(math.pi * (epoch - 5) / 95)) / 2
        assert rate == pytest.approx(source.lr * epoch / 5 if epoch < 5 else falls, rel=1e-3), step
    held = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=5e-3 * 1024 / 256)
    scheduler, schedule = CosineAnnealingLR(held, 12_500), RECIPES["dinov2_linear"].recipe().learning_rate(1_281_167)
    for step in range(12_500):
        assert schedule(step + 1) == pytest.approx(held.param_groups[0]["lr"], rel=1e-6, abs=1e-12)
        held.step()
        scheduler.step()
    baseline = RECIPES["imagenet_vit_small"].recipe()  # 10,000 steps of warm-up, then half a cosine to 0
    schedule, steps = baseline.learning_rate(1_281_167), baseline.total_steps(1_281_167)
    for step in range(0, steps, 97):
        falls = 1e-3 * (1 + math.cos(math.pi * (step - 10_000) / (steps - 10_000))) / 2
        assert schedule(step + 1) == pytest.approx(1e-3 * (step + 1) / 10_000 if step < 10_000 else falls, rel=1e-6)
    beans = RECIPES["beans"].recipe()  # CosineAnnealingWarmupLR: a warm-up of int(0.3 · steps), then torch's cosine
    schedule, steps = beans.learning_rate(1034), beans.total_steps(1034)
    warmup = schedule.warmup_steps  # Colossal-AI rounds down
    assert abs(warmup - 0.3 * steps) < 1
    held = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2e-4 * 4)
    scheduler = CosineAnnealingLR(held, steps - warmup)
    for step in range(steps):
        expected = (step + 1) / warmup * 8e-4 if step < warmup else held.param_groups[0]["lr"]
        assert schedule(step + 1) == pytest.approx(expected, rel=1e-6), step
        if step >= warmup:
            held.step()
            scheduler.step()


@pytest.mark.parametrize("name", SOURCES)
def test_parameter_groups_equal_timms(name: str) -> None:
    """Elements by weight decay and factor of the rate, of two blocks."""
    source, recipe = SOURCES[name], RECIPES[name].recipe()
    recipe = recipe.model_copy(update={"model": recipe.model.model_copy(update={"depth": 2})})
    config = recipe.config(10)
    named = list(LayeredModel(config).named_parameters())
    held = ShardedOptimizer(named, recipe.optimizer, layers_above=config.layers_above)
    sizes = {"depth": 2, "num_classes": 10, "img_size": config.image_size}
    pooled = {"global_pool": "avg", "fc_norm": True} if name == "mae_finetune_base" else {}
    if name == "cifar10_vit_lite":
        sizes |= {"patch_size": 4, "embed_dim": 256, "num_heads": 4, "mlp_ratio": 2}
    model = timm.create_model(source.model, **sizes, **pooled)
    if source.layer_decay is None:
        groups = timm.optim.param_groups_weight_decay(
            model, source.weight_decay, no_weight_decay_list=model.no_weight_decay()
        )
    else:
        groups = timm.optim.param_groups_layer_decay(
            model, source.weight_decay, model.no_weight_decay(), layer_decay=source.layer_decay
        )
    expected = elements(groups)
    found = elements(held.torch_optimizer.param_groups)
    if name == "vit5_small":  # timm has no such model; its matrices are those of DeiT III
        expected, found = ({key: n for key, n in one.items() if key[0]} for one in (expected, found))
    assert found == expected


def elements(groups: list[dict[str, Any]]) -> Counter[tuple[float, float]]:
    counted: Counter[tuple[float, float]] = Counter()
    for group in groups:
        key = round(group["weight_decay"], 9), round(group.get("lr_scale", 1.0), 9)
        counted[key] += sum(parameter.numel() for parameter in group["params"])
    return counted


@pytest.mark.parametrize("name", SOURCES)
def test_loss_and_augmentation_are_the_sources(name: str) -> None:
    source, recipe = SOURCES[name], RECIPES[name].recipe()
    classes, logits = 5, torch.randn(8, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    labels, others, weight = torch.arange(8) % classes, torch.arange(8).flip(0) % classes, 0.3
    soft = timm.data.mixup.mixup_target(labels, classes, lam=weight, smoothing=source.smoothing).double()
    theirs = timm.loss.BinaryCrossEntropy(0.0, 0.0) if source.bce else timm.loss.SoftTargetCrossEntropy()
    mixed = torch.stack([labels, others, torch.full((8,), weight)], 1).double()
    ours = task_of(recipe, classes).loss
    torch.testing.assert_close(
        ours.total(logits, mixed) / ours.count(mixed, 8), theirs(logits, soft), rtol=1e-6, atol=0
    )
    given = recipe.augment.model_dump(exclude_defaults=True)
    assert {**given, **{key: tuple(v) for key, v in given.items() if isinstance(v, list | tuple)}} == {
        **source.augment,
        **{"mixup": 0.8, "cutmix": 1.0},
    }
    train = recipe.train
    assert (train.batch_size, train.epochs, train.clip_grad_norm) == (source.batch, source.epochs, source.clip)
    assert (recipe.optimizer.name, recipe.lr) == (source.opt, pytest.approx(source.lr))


def test_self_distillation_has_the_numbers_of_dinov2() -> None:
    """Settings of ssl_default_config.yaml, the schedules of train.py and parameter groups of param_groups.py."""
    recipe = RECIPES["dinov2_vitl16_short"].recipe()
    task = task_of(recipe, 1000)
    config = recipe.config(task.outputs, task.model_options)
    heads = {"num_classes": 65_536, "head_bottleneck_dim": 256, "head_hidden_dim": 2048, "patch_head": False}
    sizes = {"local_crops": 8, "local_size": 96, "drop_path": 0.3, "layer_scale": 1e-5, "image_size": 224}
    assert {key: getattr(config, key) for key in heads | sizes} == heads | sizes
    losses = {"dino_weight": 1, "ibot_weight": 1, "koleo_weight": 0.1, "student_temp": 0.1, "centering": "centering"}
    masks = {"mask_probability": 0.5, "mask_ratio_min": 0.1, "mask_ratio_max": 0.5, "local_crops_scale": (0.05, 0.32)}
    assert {key: getattr(task, key) for key in losses | masks} == losses | masks
    train, optimizer = recipe.train, recipe.optimizer
    assert (train.batch_size, train.clip_grad_norm, train.clip_by_part, optimizer.betas) == (
        64 * 32,
        3,
        True,
        (0.9, 0.999),
    )
    assert recipe.data.crop_scale == (0.32, 1.0) and recipe.data.interpolation == "bicubic"
    epoch = 1250
    schedules = Schedules.of(recipe, 1_281_167, config)
    named = {**schedules.named, **task.schedules(schedules.lr.run)}
    assert schedules.lr.run.steps == 100 * epoch

    def cosine(first: float, last: float, warmup: int = 0) -> np.ndarray:
        steps = np.arange(100 * epoch - warmup)
        falls = last + 0.5 * (first - last) * (1 + np.cos(np.pi * steps / len(steps)))
        return np.concatenate([np.linspace(0, first, warmup), falls])

    rate = 4e-3 * math.sqrt(2048 / 1024)
    expected = {
        "weight_decay": cosine(0.04, 0.4),
        "ema_decay": cosine(0.992, 1.0),
        "teacher_temp": np.concatenate([np.linspace(0.04, 0.07, 30 * epoch), np.full(70 * epoch, 0.07)]),
        "rate_prototypes": (np.arange(100 * epoch) >= epoch).astype(float),
        "rate_backbone": np.ones(100 * epoch),
        "rate_patch_embed": np.full(100 * epoch, 0.2),
        "lr": cosine(rate, 1e-6, 10 * epoch),
    }
    named["lr"] = schedules.lr
    for key, values in expected.items():
        for step in range(0, 100 * epoch, 997):
            # There the first step after the warm-up has the largest rate once more.
            assert named[key](step + 1) == pytest.approx(values[step], rel=1e-3 if key == "lr" else 1e-9), (key, step)
    decays = {name: config.layers_above(name) for name in ("embed.pos_embed", "embed.patch_embed.proj.weight")}
    assert decays == {"embed.pos_embed": 25, "embed.patch_embed.proj.weight": 25}  # 0.9 ** (24 + 1 - 0)
    assert [config.layers_above(name) for name in ("blocks.0.norm1.weight", "blocks.23.norm1.weight")] == [24, 1]
    assert config.layers_above("head.class_head.mlp1.weight") == 0 and optimizer.layer_decay == 0.9


def test_durations_are_of_the_recipes() -> None:
    assert 5 < gpu_hours(RECIPES["deit_small"]) < gpu_hours(RECIPES["deit3_small"]) < gpu_hours(RECIPES["deit3_large"])
    with pytest.raises(RecipeError, match=r"no shipped recipe 'deit_smal' .did you mean 'deit_small'\?"):
        shipped_recipe("deit_smal")
