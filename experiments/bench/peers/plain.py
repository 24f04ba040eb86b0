"""Contender: vitpar's model, without its parallel layers, in a hand-written loop."""

import torch
from torch import nn

from bench.peers.job import Job
from bench.plain_loop import initial_model, plain_step
from bench.settings import Step


def make(job: Job) -> tuple[nn.Module, Step, str]:
    """Return model, step and version."""
    model = initial_model(job.config, job.device)
    return model, plain_step(model, job.compiled, job.precision), f"torch {torch.__version__}"
