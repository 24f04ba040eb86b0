"""Contender: vitpar's model, without its parallel layers, in a hand-written loop."""

from itertools import cycle
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from bench.peers.job import Job
from bench.peers.same import batches, count, our_model
from bench.peers.turns import Turns
from bench.plain_loop import plain_step


def train(job: Job, turns: Turns) -> NoReturn:
    """Train until the process ends."""
    model = our_model(job)
    if job.saving:
        recompute(model.blocks.values())
    train_plainly(model, job, turns, f"torch {torch.__version__}")


def train_plainly(model: nn.Module, job: Job, turns: Turns, version: str) -> NoReturn:
    """Train `model`, which maps images to logits, with the hand-written loop until the process ends."""
    step = plain_step(model, job.compiled, job.precision)
    turns.ready(count(model), version)
    for images, labels in cycle(batches(job)):
        turns.stepped(step(images, labels)[0])
    raise AssertionError("there is always another batch")


def recompute(blocks: Any) -> None:
    """Apply activation checkpointing to every block."""
    for block in blocks:
        forward = block.forward
        block.forward = lambda *args, forward=forward: checkpoint(forward, *args, use_reentrant=False)
