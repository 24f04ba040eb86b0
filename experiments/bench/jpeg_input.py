"""Training speed on JPEG files from shards, compared with training on one batch that is already on the device."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.harness import take_turns
from bench.one_gpu import settle
from bench.ours import VitparStep
from bench.photographs import write_photographs
from vitpar.data.loader import Batch
from vitpar.data.shards.pack import pack
from vitpar.recipe import Recipe
from vitpar.tasks import task_of
from vitpar.tasks.data import open_split
from vitpar.tasks.image_input import ImageInput
from vitpar.text import count

POLICY = "rand-m9-n2-mstd0.5-inc1"


@dataclass(frozen=True)
class Feed:
    """A way to prepare images."""

    workers: int
    """Decoding threads."""
    augmented: bool = False
    """Whether RandAugment follows crop and flip."""
    decode: str = "host"
    """Value of `data.decode`."""

    @property
    def name(self) -> str:
        """Name in the table."""
        work = "crop, flip, RandAugment" if self.augmented else "crop, flip"
        return f"{work}; {count(self.workers, 'thread')}; decoded on the {self.decode}"

    def recipe(self, path: Path, batch_size: int) -> Recipe:
        """Return the recipe of a training on the packed data set `path`."""
        sections = {
            "data": {"path": str(path), "workers": self.workers, "decode": self.decode},
            "augment": {"policy": POLICY if self.augmented else None},
            "train": {"batch_size": batch_size, "precision": "bf16", "steps": 1},
        }
        return Recipe.model_validate(sections)


def beside_synthetic(
    step: VitparStep,
    batch: tuple[Tensor, Tensor],
    device: torch.device,
    feeds: Sequence[Feed],
    *,
    steps: int,
    rounds: int,
    photographs: int,
) -> Iterator[tuple[Feed, dict[str, Any]]]:
    """Time training on JPEG files, each feed in turn with the given batch.

    Yields for each feed the seconds of a step (a mean for every round), the images/s of the input pipeline alone, and
    the mean size of the JPEG files in bytes.

    batch: images and labels on the device. steps: steps per round; must far exceed the few batches that are decoded
    ahead, which would otherwise hide the speed of the input. photographs: training images to create.

    Raises RecipeError for a feed that needs a package which is missing.
    """
    size = len(batch[1])
    with tempfile.TemporaryDirectory() as folder:
        photos, packed = Path(folder, "images"), Path(folder, "packed")
        mean_bytes = write_photographs(photos, photographs)
        pack(photos, packed, workers=max(feed.workers for feed in feeds))
        for feed in feeds:
            recipe = feed.recipe(packed, size)
            given = ImageInput(recipe, step.model, task_of(recipe, step.model.config.num_classes))
            images = open_split(recipe, "train")
            given.cache(images)
            with closing(iter(given.train_batches(images))) as batches:

                def real(given: ImageInput = given, batches: Iterator[Batch] = batches) -> None:
                    for _ in range(steps):
                        images, labels, *_ = given.train_step(next(batches))
                        assert images is not None
                        step(images, labels)

                def synthetic() -> None:
                    for _ in range(steps):
                        step(*batch)

                for _ in range(3):  # decoded ahead
                    next(batches)
                begun = time.perf_counter()
                for _ in range(steps):
                    next(batches)
                alone = steps * size / (time.perf_counter() - begun)
                real()
                times = take_turns({"synthetic": synthetic, "JPEG": real}, rounds, partial(settle, device))
            seconds = {name: [wall / steps for wall in one.wall] for name, one in times.items()}
            yield feed, {"seconds": seconds, "input_alone": alone, "mean_bytes": mean_bytes, **vars(feed)}
