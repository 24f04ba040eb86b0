"""Reference for vitpar's first step on a GPU: the plain LayeredModel, and the batch that both train on."""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.settings import SEED
from vitpar.models import ViTConfig
from vitpar.models.layers import LayeredModel


def random_batch(config: ViTConfig, batch_size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return random bf16 images [batch, channels, size, size] and labels [batch] on the device."""
    g = torch.Generator().manual_seed(SEED)
    images = torch.randn(batch_size, config.channels, config.image_size, config.image_size, generator=g)
    labels = torch.randint(0, config.num_classes, (batch_size,), generator=g)
    return images.to(device, torch.bfloat16), labels.to(device)


def reference(config: ViTConfig, parameters: Mapping[str, Tensor], images: Tensor, labels: Tensor) -> list[float]:
    """Return loss and gradient norm of the plain, uncompiled LayeredModel, with `parameters` cast to bf16.

    They are copied: drawing initial values again would take half a minute for large models.
    """
    with torch.device("meta"):
        model = LayeredModel(config)
    model.to_empty(device=images.device).load_state_dict(dict(parameters))
    for layer in model.layers().values():
        layer.reset_buffers()
    computed = {name: p.to(torch.bfloat16) for name, p in model.named_parameters()}
    loss = F.cross_entropy(torch.func.functional_call(model, computed, (images,)).float(), labels)
    loss.backward()
    return [loss.item(), torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()]


def difference(values: list[float], expected: list[float]) -> str:
    """Return as text how vitpar's first loss and gradient norm differ from those of the plain ViT."""
    parts = [
        f"{what} {a:.6f} against {b:.6f} (relative difference {abs(a - b) / abs(b):.1e})"
        for what, a, b in zip(("loss", "gradient norm"), values, expected, strict=True)
    ]
    return ", ".join(parts)
