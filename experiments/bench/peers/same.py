"""Input shared by all contenders: batches, and initial parameters under each contender's names."""

import torch
from torch import Tensor, nn

from bench.peers.job import Job
from bench.plain_loop import initial_model
from bench.settings import SEED
from vitpar.weights.foreign import recognised

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
