"""Contender: vitpar's plain model under Lightning's Trainer with barebones=True, its mode for measuring overhead."""

from collections.abc import Iterator
from itertools import cycle
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from bench.peers.job import Job
from bench.peers.plain import recompute
from bench.peers.same import batches, count, our_model
from bench.peers.turns import Turns
from bench.plain_loop import adamw
from bench.settings import CLIP

try:
    import lightning
    from lightning import pytorch as pl
except ModuleNotFoundError:  # the name of its older package
    import pytorch_lightning as pl

    lightning = pl


class Ready(IterableDataset):
    """Endless data set of complete batches, already on the device."""

    def __init__(self, job: Job) -> None:
        self._batches = batches(job)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return cycle(self._batches)


class Module(pl.LightningModule):
    """Lightning module: the model with its loss and optimizer."""

    def __init__(self, model: nn.Module, compiled: bool) -> None:
        super().__init__()
        self.model = model
        self._forward = torch.compile(model) if compiled else model

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        images, labels = batch
        return F.cross_entropy(self._forward(images), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return adamw(self.model)

    def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
        # Lightning's own clipping rejects fused optimizers under mixed precision.
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)


class Gate(pl.Callback):
    """Callback that reports every step to `turns`."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *args: Any) -> None:
        self._turns.stepped(outputs["loss"])


def train(job: Job, turns: Turns) -> NoReturn:
    """Train until the process ends."""
    model = our_model(job)
    if job.saving:
        recompute(model.blocks.values())
    trainer = pl.Trainer(
        accelerator="gpu" if job.device == "cuda" else "cpu",
        devices=1,
        precision="bf16-mixed" if job.precision == "bf16" else "32-true",
        max_steps=-1,
        max_epochs=-1,
        barebones=True,
        callbacks=[Gate(turns)],
    )
    turns.ready(count(model), f"lightning {lightning.__version__}")
    trainer.fit(Module(model, job.compiled), DataLoader(Ready(job), batch_size=None))
    raise AssertionError("there is always another batch")
