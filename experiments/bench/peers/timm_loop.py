"""Contender: timm's VisionTransformer or SwinTransformer in the hand-written loop of ``bench.peers.plain``."""

from typing import NoReturn

import timm
from timm.models.swin_transformer import SwinTransformer
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from bench.peers.job import Job
from bench.peers.plain import train_plainly
from bench.peers.same import start_as_ours
from bench.peers.turns import Turns
from vitpar.models.swin.config import SwinConfig


def train(job: Job, turns: Turns) -> NoReturn:
    """Train until the process ends."""
    model = timms(job).to(job.device)
    start_as_ours(model, job)
    model.set_grad_checkpointing(job.saving)
    train_plainly(model, job, turns, f"timm {timm.__version__}")


def timms(job: Job) -> nn.Module:
    """Return timm's model, with its own initial parameters."""
    c = job.config
    if isinstance(c, SwinConfig):
        return SwinTransformer(
            img_size=c.image_size,
            patch_size=c.patch_size,
            num_classes=c.num_classes,
            embed_dim=c.embed_dim,
            depths=c.depths,
            num_heads=c.num_heads,
            window_size=c.window_size,
            mlp_ratio=c.mlp_ratio,
            drop_path_rate=0.0,
        )
    return VisionTransformer(
        img_size=c.image_size,
        patch_size=c.patch_size,
        num_classes=c.num_classes,
        embed_dim=c.embed_dim,
        depth=c.depth,
        num_heads=c.num_heads,
        mlp_ratio=c.mlp_hidden_dim / c.embed_dim,
    )
