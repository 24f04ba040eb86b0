"""Contender: timm's VisionTransformer or SwinTransformer in the hand-written loop."""

import timm
from timm.models.swin_transformer import SwinTransformer
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from bench.peers.job import Job
from bench.peers.same import start_as_ours
from bench.plain_loop import plain_step
from bench.settings import Step
from vitpar.models.swin.config import SwinConfig


def make(job: Job) -> tuple[nn.Module, Step, str]:
    """Return timm's model, with vitpar's initial parameters, its step, and the version."""
    model = timms(job).to(job.device)
    start_as_ours(model, job)
    return model, plain_step(model, job.compiled, job.precision), f"timm {timm.__version__}"


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
