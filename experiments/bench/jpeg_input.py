"""Training speed on JPEG files from shards, compared with training on one batch that is already on the device."""

from __future__ import annotations

import tempfile
import time
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.harness import take_turns
from bench.one_gpu import settle
from bench.ours import VitparStep
from bench.photographs import write_photographs
from vitpar.data import pack
from vitpar.tasks import task_of
from vitpar.tasks.image_data import open_split
from vitpar.tasks.image_input import ImageInput
from vitpar.training.recipe import Recipe


def beside_synthetic(
    step: VitparStep,
    batch: tuple[Tensor, Tensor],
    device: torch.device,
    *,
    steps: int,
    rounds: int,
    photographs: int,
    workers: int,
) -> dict[str, Any]:
    """Time training on JPEG files and on the given batch in turn.

    Returns the seconds of a step (a mean for every round), the images/s of the input pipeline alone, the mean size of
    the JPEG files in bytes, and the number of workers. Images are decoded, cropped at random to the model's size,
    flipped, sent to the device and normalised, as in the trainer.

    batch: images and labels on the device. steps: steps per round; must far exceed the few batches that are decoded
    ahead, which would otherwise hide the speed of the input. photographs: training images to create. workers: decoding
    threads.
    """
    size = len(batch[1])
    with tempfile.TemporaryDirectory() as folder:
        images, packed = Path(folder, "images"), Path(folder, "packed")
        mean_bytes = write_photographs(images, photographs)
        pack(images, packed, workers=workers)
        recipe = Recipe.model_validate(
            {
                "data": {"path": str(packed), "workers": workers},
                "train": {"batch_size": size, "precision": "bf16", "steps": 1},
            }
        )
        given = ImageInput(recipe, step.model, task_of(recipe, step.model.config.num_classes))
        with closing(iter(given.train_batches(open_split(recipe, "train")))) as batches:

            def real() -> None:
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
    return {"seconds": seconds, "input_alone": alone, "mean_bytes": mean_bytes, "workers": workers}
