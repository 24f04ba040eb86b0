"""Contender: vitpar's training step without its Trainer."""

from itertools import cycle
from typing import NoReturn

import torch

from bench.ours import vitpar_step
from bench.peers.job import Job
from bench.peers.same import batches
from bench.peers.turns import Turns
from vitpar.launch import ALONE, join
from vitpar.strategy import Plan, parse, validate


def plan(job: Job) -> Plan:
    """Return dp1; with `job.saving` also activation checkpointing and CPU offload of parameters and AdamW state."""
    return validate(parse("dp1+ckpt+offload" if job.saving else "dp1"), job.config, job.batch_size)


def train(job: Job, turns: Turns) -> NoReturn:
    """Train until the process ends."""
    device = join(ALONE, job.device)
    step = vitpar_step(
        job.config, plan(job), job.batch_size, device, precision=job.precision, compile_blocks=job.compiled
    )
    turns.ready(sum(p.numel() for _, p in step.model.named_parameters()), f"torch {torch.__version__}")
    for images, labels in cycle(batches(job)):
        turns.stepped(step(images, labels)[0])
    raise AssertionError("there is always another batch")
