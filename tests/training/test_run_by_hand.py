"""Complete runs: compared with a plain loop; with schedules, augmentation and mixing, with runs under other meshes."""

import math
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from helpers.ranks import Ranks
from helpers.run_folder import losses_of, rows_of
from helpers.small_data import pack_small
from helpers.trained import CPU, recipe_of, train, trainer_of
from vitpar.data.loader import EvalLoader, TrainLoader
from vitpar.data.randomness import SampleOrder
from vitpar.data.shards.shard_set import ShardSet
from vitpar.data.transforms.batch import Normalize
from vitpar.data.transforms.sample import EvalTransform, TrainTransform
from vitpar.errors import RecipeError
from vitpar.models.initial import initialise
from vitpar.models.layers import LayeredModel
from vitpar.recipe import Recipe
from vitpar.strategy import parse
from vitpar.training.prepare import prepare

SETTINGS: dict[str, Any] = {
    **{"train.steps": 6, "train.batch_size": 12, "train.clip_grad_norm": 0.5, "train.label_smoothing": 0.1},
    **{"train.ema_decay": 0.7, "train.seed": 3, "train.log_every": 1, "lr_schedule.warmup": 2},
    # A large eps: gradients of key biases are pure rounding noise, which Adam with a small eps scales to full steps.
    **{"optimizer.lr": 0.01, "optimizer.weight_decay": 0.2, "optimizer.eps": 1e-3, "model.drop_path": 0.2},
}
RATES = [0.005, 0.01, *(0.01 * (1 + math.cos(math.pi * step / 4)) / 2 for step in range(4))]


def by_hand(
    recipe: Recipe, data: Path, decays: list[float], shares: list[float], sizes: list[int]
) -> tuple[list[dict[str, float]], dict[str, float], dict[str, Tensor]]:
    """Return loss, gradient norm and rate of each step, the final evaluation, and the averaged parameters.

    decays, shares, sizes: weight decay, part of the rates of stochastic depth, and image size of each step.
    """
    config = recipe.config(7)
    model = LayeredModel(config)
    initialise(model, 3, config)
    named = dict(model.named_parameters())
    matrices = [p for name, p in named.items() if name.endswith(".weight") and "norm" not in name]
    rest = [p for p in named.values() if all(p is not matrix for matrix in matrices)]
    groups = [{"params": matrices, "weight_decay": 0.2}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=recipe.optimizer.betas, eps=recipe.optimizer.eps)
    averages = {name: p.detach().clone() for name, p in named.items()}
    settings, shards = recipe.data, ShardSet.open(data, "train")
    normalize = Normalize(settings.mean, settings.std)
    crop = settings.crop_scale, settings.crop_ratio, settings.flip, settings.interpolation
    order = SampleOrder(3, len(shards))
    steps = []
    for number, (rate, decay, share, size) in enumerate(zip(RATES, decays, shares, sizes, strict=True)):
        transform, more = TrainTransform(size, *crop), {"start": 12 * number, "batch_size": 12, "workers": 0}
        batch = next(iter(TrainLoader(shards, transform, order=order, **more)))
        for index, block in enumerate(model.blocks.values()):
            block.rate.fill_(0.2 * share * index / 3)
        logits = model(normalize(batch.images), batch.keys)
        loss = F.cross_entropy(logits, batch.labels, label_smoothing=0.1)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.param_groups[0]["weight_decay"] = decay
        optimizer.step()
        optimizer.zero_grad()
        for name, p in named.items():
            averages[name] = 0.7 * averages[name] + 0.3 * p.detach()
        right = (logits.argmax(1) == batch.labels).double().mean().item()
        crc = zlib.crc32(b"".join(key.to_bytes(8, "little") for key in batch.keys.tolist()))
        steps.append({"loss": loss.item(), "grad_norm": norm.item(), "lr": rate, "top1": right, "samples_crc32": crc})
    model.load_state_dict(averages, strict=False)
    val = ShardSet.open(data, "val")
    (batch,) = EvalLoader(val, EvalTransform(8, settings.crop_pct), batch_size=len(val), workers=0)
    with torch.no_grad():
        logits = model.eval()(normalize(batch.images))
    top1 = (logits.argmax(1) == batch.labels).double().mean().item()
    return steps, {"loss": F.cross_entropy(logits, batch.labels).item(), "top1": top1}, averages


SCHEDULES: dict[str, Any] = {
    "optimizer.weight_decay_end": 5.0,
    "train.drop_path_schedule": "early(until=4, form=linear)",
    "train.image_sizes": "4 until 2",
}


@pytest.mark.parametrize("scheduled", [False, True])
def test_run_matches_a_plain_loop(scheduled: bool, tmp_path: Path, alone: None) -> None:
    """The plain loop is written independently, so it detects mistakes that all plans share."""
    data = pack_small(tmp_path)
    recipe = recipe_of(data, "dp1", **SETTINGS, **(SCHEDULES if scheduled else {}))
    train(CPU, recipe, tmp_path / "run")
    end = 5.0 if scheduled else 0.2
    decays = [0.2 + (end - 0.2) * (1 - math.cos(math.pi * step / 6)) / 2 for step in range(6)]
    shares = [1, 2 / 3, 1 / 3, 0, 0, 0] if scheduled else [1.0] * 6
    sizes = [4, 4, 8, 8, 8, 8] if scheduled else [8] * 6
    steps, evaluation, averages = by_hand(recipe, data, decays, shares, sizes)
    rows = rows_of(tmp_path / "run")
    for name, values in (
        ("weight_decay", decays),
        ("drop_path", [0.2 * share for share in shares]),
        ("image_size", sizes),
    ):
        logged = [row.get(name) for row in rows]
        assert logged == (pytest.approx(values, abs=1e-12) if scheduled else [None] * 6)
    assert min(step["grad_norm"] for step in steps) > 0.5, "nothing is clipped"
    assert [row["samples_crc32"] for row in rows] == [step["samples_crc32"] for step in steps]
    for row, step in zip(rows, steps, strict=True):
        assert {name: row[name] for name in step} == pytest.approx(step, rel=1e-4), row["step"]
    last = rows_of(tmp_path / "run", "eval")[-1]
    assert {name: last[name] for name in evaluation} == pytest.approx(evaluation, rel=1e-4)
    saved = {
        name: tensor
        for path in (tmp_path / "run" / "weights").glob("*.safetensors")
        for name, tensor in load_file(path).items()
    }
    assert saved.keys() == averages.keys()
    for name, tensor in saved.items():
        torch.testing.assert_close(tensor, averages[name], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(("every", "steps"), [("1e-9 minutes", [1, 2, 3]), ("60 minutes", [3]), ("2 steps", [2, 3])])
def test_evaluations_are_due_by_step_or_by_time(every: str, steps: list[int], tmp_path: Path, alone: None) -> None:
    settings = {"train.eval_every": every, "train.steps": 3, "train.log_every": 1}
    train(CPU, recipe_of(pack_small(tmp_path), "dp1", **settings), tmp_path / "run")
    assert [row["step"] for row in rows_of(tmp_path / "run", "eval")] == steps


@pytest.mark.parametrize(("mesh", "batch"), [("pp2xtp2", 12), ("tp2xdp2+sp", 12), ("tp4+2d", 12), ("tp4", 2)], ids=str)
def test_schedules_do_not_depend_on_the_plan(mesh: str, batch: int, tmp_path: Path, ranks: Ranks) -> None:
    """Under pp the shapes between stages change with the image size; evaluations in between have the model's.

    Two of the ranks of tp4 decode no image of a batch of two.
    """
    more = {"parallel.schedule": "interleaved1f1b", "parallel.virtual_stages": 2} if "pp" in mesh else {}
    data = pack_small(tmp_path)
    settings = {**SETTINGS, **SCHEDULES, "train.eval_every": 1, "augment.cutmix": 1.0, "train.batch_size": batch}
    for plan, changed in (("dp1", {}), (mesh, more)):
        pool = ranks(parse(plan).world_size)
        pool.run(train, recipe_of(data, plan, **settings, **changed), tmp_path / plan)
    for kind in ("train", "eval"):
        one, other = ([row["loss"] for row in rows_of(tmp_path / plan, kind)] for plan in ("dp1", mesh))
        assert other == pytest.approx(one, rel=1e-5) and len(one) == 6


def test_a_data_set_without_val_trains_alike_and_is_not_evaluated(tmp_path: Path, alone: None) -> None:
    losses = []
    for val in (True, False):
        data, run = pack_small(tmp_path / str(val), val=val), tmp_path / f"run-{val}"
        summary = trainer_of(recipe_of(data, "dp1"), run).run()
        losses.append(losses_of(run))
        assert len(rows_of(run, "eval")) == (6 if val else 0) and ("top1" in summary) == val
    assert losses[0] == losses[1] and len(losses[0]) == 6
    assert "not evaluated" in (run / "log.txt").read_text()
    with pytest.raises(RecipeError, match=r"checkpoint.keep_best needs evaluations, but .* has no val split"):
        prepare(recipe_of(data, "dp1", **{"checkpoint.keep_best": True}), "cpu")
    assert not (tmp_path / "best").exists()


CROPS = {"resized": ({}, "fsdp4"), "padded": ({"data.crop_padding": 2, "augment.policy": "cifar10"}, "pp2xtp2")}


@pytest.mark.parametrize(("crop", "plan"), CROPS.values(), ids=CROPS)
def test_augmented_and_mixed_images_do_not_depend_on_the_mesh(
    crop: dict[str, Any], plan: str, ranks: Ranks, tmp_path: Path
) -> None:
    """With two images per rank, mixup partners lie on other ranks, and batches cut the runs of repeated samples.

    Images on the device are the same bit by bit, also where ranks share the work on them.

    plan: of the ranks whose images are on the device.
    """
    data = pack_small(tmp_path)
    settings = {
        **{"augment.policy": "rand-m9-n2-mstd0.5-inc1", "augment.color_jitter": 0.4, "augment.random_erasing": 0.5},
        **{"augment.repeats": 3, "augment.mixup": 0.8, "augment.cutmix": 1.0, "augment.mixup_prob": 0.8},
        **{"data.shuffle_window": 12, "data.shuffle_block": 4, "model.drop_path": 0.1, "train.batch_size": 8},
        **crop,
    }
    for name, mesh, size, cache in (
        ("dp1", "dp1", 1, "none"),
        ("cached", "dp1", 1, "memory"),
        ("fsdp4", "fsdp4", 4, "memory"),
        ("held", "dp1", 1, "device"),
        ("held4", plan, 4, "device"),
    ):
        recipe = recipe_of(data, mesh, **settings, **{"train.log_every": 1, "data.cache": cache})
        ranks(size).run(train, recipe, tmp_path / name)
    assert losses_of(tmp_path / "cached") == losses_of(tmp_path / "held") == losses_of(tmp_path / "dp1")
    assert losses_of(tmp_path / "held4") == pytest.approx(losses_of(tmp_path / "dp1"), rel=1e-5)
    held = "images are held in one memory of a machine's ranks, 0.014 MB, and augmented there in batches"
    assert held in (tmp_path / "held4" / "log.txt").read_text()
    log = (tmp_path / "fsdp4" / "log.txt").read_text()
    assert "decoded images are cached: about 0.0266 MB, in at most" in log
    assert losses_of(tmp_path / "fsdp4") == pytest.approx(losses_of(tmp_path / "dp1"), rel=1e-5)
    norms = [[row["grad_norm"] for row in rows_of(tmp_path / mesh)] for mesh in ("fsdp4", "dp1")]
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)
    assert len(set(norms[0])) == len(norms[0]) > 3
