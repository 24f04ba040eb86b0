"""Augmentation, mixup and cutmix under a mesh: equal losses and gradient norms for every plan, cached images too."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from helpers.ranks import RankPool
from helpers.run_folder import losses_of, rows_of
from helpers.small_data import pack_small
from helpers.trained import recipe_of, train

CROPS = {"resized": ({}, "fsdp4"), "padded": ({"data.crop_padding": 2, "augment.policy": "cifar10"}, "pp2xtp2")}


@pytest.mark.parametrize(("crop", "plan"), CROPS.values(), ids=CROPS)
def test_augmented_and_mixed_images_do_not_depend_on_the_mesh(
    crop: dict[str, Any], plan: str, ranks: Callable[[int], RankPool], tmp_path: Path
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
