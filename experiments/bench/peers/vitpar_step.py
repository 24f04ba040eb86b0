"""Contender: vitpar's training step."""

import torch

from bench.ours import VitparStep, vitpar_step
from bench.peers.job import Job
from vitpar.launch import ALONE, join
from vitpar.parallel import ParallelModel
from vitpar.strategy import parse, validate


def make(job: Job) -> tuple[ParallelModel, VitparStep, str]:
    """Return model, step and version."""
    plan = validate(parse("dp1"), job.config, job.batch_size)
    device, numbers = join(ALONE, job.device), {"precision": job.precision, "compile_blocks": job.compiled}
    step = vitpar_step(job.config, plan, job.batch_size, device, **numbers)
    return step.model, step, f"torch {torch.__version__}"
