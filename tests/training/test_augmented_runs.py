"""Augmentation, mixup and cutmix under a mesh: equal losses and gradient norms for every plan, cached images too."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from helpers.ranks import RankPool
from helpers.run_folder import losses_of, rows_of
from helpers.small_data import pack_small
from helpers.trained import recipe_of, train


@pytest.mark.parametrize("crop", [{}, {"data.crop_padding": 2, "augment.policy": "cifar10"}], ids=["resized", "padded"])
def test_augmented_and_mixed_images_do_not_depend_on_the_mesh(
    crop: dict[str, Any], ranks: Callable[[int], RankPool], tmp_path: Path
) -> None:
    """With two images per rank, mixup partners lie on other ranks, and batches cut the runs of repeated samples."""
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
    ):
        recipe = recipe_of(data, mesh, **settings, **{"train.log_every": 1, "data.cache": cache})
        ranks(size).run(train, recipe, tmp_path / name)
    assert losses_of(tmp_path / "cached") == losses_of(tmp_path / "dp1")
    log = (tmp_path / "fsdp4" / "log.txt").read_text()
    assert "decoded images are cached: about 0.0266 MB, in at most" in log
    assert losses_of(tmp_path / "fsdp4") == pytest.approx(losses_of(tmp_path / "dp1"), rel=1e-5)
    norms = [[row["grad_norm"] for row in rows_of(tmp_path / mesh)] for mesh in ("fsdp4", "dp1")]
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)
    assert len(set(norms[0])) == len(norms[0]) > 3
