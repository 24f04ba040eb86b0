"""Contender: vitpar's complete Trainer, with its metrics, logging and time checks between steps.

Only the input is replaced: batches are already on the device. The data set has an index but no images.
"""

import tempfile
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from bench.peers.job import Job
from bench.peers.same import batches
from bench.peers.turns import Turns
from bench.peers.vitpar_step import plan
from bench.settings import BETAS, CLIP, EPS, LR, SEED, WEIGHT_DECAY
from vitpar.data import Batch
from vitpar.data.shards.manifest import ROW, Manifest, write_manifest, write_split
from vitpar.launch import ALONE, join
from vitpar.training.events import Reporter
from vitpar.training.recipe import Recipe
from vitpar.training.step import Stepped
from vitpar.training.trainer import Trainer

NEVER = 10**9


class Ready:
    """Replacement of ``vitpar.training.input.Input``: batches on the device. Reports every step to `turns`."""

    def __init__(self, job: Job, turns: Turns) -> None:
        self._job, self._turns = job, turns
        self._here: tuple[Tensor, Tensor] | None = None
        self.loss = torch.zeros(())

    def train_batches(self, images: object, start: int = 0) -> Iterator[Batch]:
        """Yield batches without end."""
        size = self._job.batch_size
        labels = torch.zeros(size, dtype=torch.int64)
        for number, batch in enumerate(cycle(batches(self._job)), start=1):
            self._here = batch
            yield Batch(None, labels, labels, epoch=0.0, samples=start + number * size)
            self._turns.stepped(self.loss)

    def train_step(self, batch: Batch) -> tuple[Tensor, Tensor, None]:
        """Return images and labels of the batch, and None: the model draws no random numbers."""
        assert self._here is not None
        return *self._here, None


class Watched(Trainer):
    """Trainer that passes each loss to its input, which reports it."""

    def step(self, number: int, batch: Batch) -> Stepped:
        stepped = super().step(number, batch)
        self.input.loss = stepped.loss
        return stepped


def train(job: Job, turns: Turns) -> NoReturn:
    """Train until the process ends."""
    device = join(ALONE, job.device)
    with tempfile.TemporaryDirectory() as folder:
        write_data(Path(folder, "data"), job)
        trainer = Watched(
            recipe(Path(folder, "data"), job), plan(job), device, reporter=Reporter(), run_dir=Path(folder, "run")
        )
        trainer.input = Ready(job, turns)
        turns.ready(sum(p.numel() for _, p in trainer.model.named_parameters()), f"torch {torch.__version__}")
        trainer.run()
    raise AssertionError("there is always another batch")


def recipe(data: Path, job: Job) -> Recipe:
    """Return a recipe with the settings of all contenders (``bench.settings``), without evaluation and checkpoints."""
    c = job.config
    sections: dict[str, Any] = {
        "model": {
            "name": job.model,
            "init": c.init,
            **{name: value for name, value in job.options.items() if name != "num_classes"},
        },
        "data": {"path": str(data)},
        "optimizer": {"lr": LR, "weight_decay": WEIGHT_DECAY, "betas": BETAS, "eps": EPS},
        "lr_schedule": {"warmup_steps": 0, "min_lr": LR},
        "train": {
            "batch_size": job.batch_size,
            "steps": NEVER,
            "eval_every": NEVER,
            "seed": SEED,
            "precision": job.precision,
            "compile": job.compiled,
            "clip_grad_norm": CLIP,
        },
        "checkpoint": {"every_steps": 0},
    }
    assert c.num_classes == job.options.get("num_classes", 1000)
    return Recipe.model_validate(sections)


def write_data(folder: Path, job: Job) -> None:
    """Write an index with one sample per class, and sparse shards, which use no disk space."""
    folder.mkdir()
    classes = job.config.num_classes
    rows = np.zeros(classes, ROW)
    rows["label"], rows["size"] = np.arange(classes), 1
    rows["offset"] = 1024 * np.arange(classes) + 512
    splits = {}
    for split in ("train", "val"):
        shard = folder / f"{split}-000000.tar"
        with shard.open("wb") as file:
            file.truncate(1024 * (classes + 1))
        splits[split] = write_split(folder, split, [shard], [rows.copy()], classes)
    write_manifest(folder, Manifest(classes=[str(label) for label in range(classes)], splits=splits))
