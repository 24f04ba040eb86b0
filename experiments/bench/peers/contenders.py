"""Contenders of ``bench_peers.py``: functions that return a model, its step, and the library's name and version.

All share batches and initial parameters.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bench.ours import vitpar_step
from bench.peers.job import Job
from bench.plain_loop import initial_model, plain_step
from bench.settings import SEED, Step
from vitpar.launch import ALONE, join
from vitpar.models.swin.config import SwinConfig
from vitpar.strategy import parse, validate
from vitpar.weights.foreign import recognised

Made = tuple[nn.Module, Step, str]
BATCHES = 3


def batches(job: Job) -> list[tuple[Tensor, Tensor]]:
    """Return BATCHES batches on the device: random images [batch, channels, size, size] and labels [batch]."""
    config, g = job.config, torch.Generator().manual_seed(SEED)
    dtype = torch.bfloat16 if job.precision == "bf16" else torch.float32
    shape = (job.batch_size, config.channels, config.image_size, config.image_size)
    found = []
    for _ in range(BATCHES):
        images = torch.randn(shape, generator=g).to(job.device, dtype)
        found.append((images, torch.randint(0, config.num_classes, shape[:1], generator=g).to(job.device)))
    return found


@torch.no_grad()
def start_as_ours(model: nn.Module, job: Job) -> None:
    """Copy vitpar's initial parameters into a model of timm.

    vitpar's weight import maps their tensors to vitpar's. Applied to element indices instead of values, it returns the
    permutation, which is then inverted.
    """
    theirs = dict(model.named_parameters())
    ours = dict(initial_model(job.config, job.device).named_parameters())
    family, found = recognised(job.model, {name: tuple(p.shape) for name, p in theirs.items()})
    made = family.parts(found, job.config)
    assert made.keys() == ours.keys(), f"parameters differ: {sorted(made.keys() ^ ours.keys())}"
    for name, part in made.items():
        places, end = [], 0
        for theirs_name in part.names:
            numbers = torch.arange(end, end + theirs[theirs_name].numel()).view(theirs[theirs_name].shape)
            places.append(numbers)
            end += numbers.numel()
        order = part.make(*places).flatten().to(job.device)
        values = torch.empty(end, device=job.device)
        values[order] = ours[name].flatten()
        for theirs_name, piece in zip(part.names, values.split([x.numel() for x in places]), strict=True):
            theirs[theirs_name].copy_(piece.view(theirs[theirs_name].shape))


def make_vitpar_step(job: Job) -> Made:
    """Return vitpar's parallel model and training step."""
    plan = validate(parse("dp1"), job.config, job.batch_size)
    numbers = {"precision": job.precision, "compile_blocks": job.compiled}
    step = vitpar_step(job.config, plan, job.batch_size, join(ALONE, job.device), **numbers)
    return step.model, step, f"torch {torch.__version__}"


def make_plain(job: Job) -> Made:
    """Return vitpar's model, without its parallel layers, in a hand-written loop."""
    model = initial_model(job.config, job.device)
    return model, plain_step(model, job.compiled, job.precision), f"torch {torch.__version__}"


def make_timm_loop(job: Job) -> Made:
    """Return timm's model in the same loop."""
    import timm

    model = timms(job).to(job.device)
    start_as_ours(model, job)
    return model, plain_step(model, job.compiled, job.precision), f"timm {timm.__version__}"


def timms(job: Job) -> nn.Module:
    """Return timm's VisionTransformer or SwinTransformer, with its own initial parameters."""
    from timm.models.swin_transformer import SwinTransformer
    from timm.models.vision_transformer import VisionTransformer

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
