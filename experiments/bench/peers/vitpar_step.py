"""vitpar's step without the loop around it."""

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
    """One rank; to save memory it computes blocks again and keeps parameters and AdamW's state on the host."""
    return validate(parse("dp1+ckpt+offload" if job.saving else "dp1"), job.config, job.batch_size)


def train(job: Job, turns: Turns) -> NoReturn:
    """Without end."""
    device = join(ALONE, job.device)
    step = vitpar_step(
        job.config, plan(job), job.batch_size, device, precision=job.precision, compile_blocks=job.compiled
    )
    turns.ready(sum(p.numel() for _, p in step.model.named_parameters()), f"torch {torch.__version__}")
    for images, labels in cycle(batches(job)):
        turns.stepped(step(images, labels)[0])
    raise AssertionError("there is always another batch")
