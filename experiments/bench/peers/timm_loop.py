"""Contender: timm's VisionTransformer in the hand-written loop of ``bench.peers.plain``."""

from typing import NoReturn

import timm
from timm.models.vision_transformer import VisionTransformer

from bench.peers.job import Job
from bench.peers.plain import train_plainly
from bench.peers.same import start_as_ours
from bench.peers.turns import Turns


def train(job: Job, turns: Turns) -> NoReturn:
    """Train until the process ends."""
    c = job.config
    model = VisionTransformer(
        img_size=c.image_size,
        patch_size=c.patch_size,
        num_classes=c.num_classes,
        embed_dim=c.embed_dim,
        depth=c.depth,
        num_heads=c.num_heads,
        mlp_ratio=c.mlp_hidden_dim / c.embed_dim,
    ).to(job.device)
    start_as_ours(model, job)
    model.set_grad_checkpointing(job.saving)
    train_plainly(model, job, turns, f"timm {timm.__version__}")
