"""Reference for vitpar's first step on a GPU: the unwrapped ViT and the batch that both take."""

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.settings import SEED
from vitpar.models import ViTConfig
from vitpar.models.initial import initialise
from vitpar.models.vit import ViT


def random_batch(config: ViTConfig, batch_size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return images in bf16 and labels, on the device."""
    g = torch.Generator().manual_seed(SEED)
    images = torch.randn(batch_size, config.channels, config.image_size, config.image_size, generator=g)
    labels = torch.randint(0, config.num_classes, (batch_size,), generator=g)
    return images.to(device, torch.bfloat16), labels.to(device)


def plain_model(config: ViTConfig, device: torch.device) -> ViT:
    """Return the unwrapped ViT with the parameters that vitpar starts from, float32."""
    model = ViT(config).to(device)
    initialise(model, SEED, config)
    return model


def reference(config: ViTConfig, images: Tensor, labels: Tensor) -> list[float]:
    """Return loss and gradient norm of the initial parameters, cast from float32 to bf16: no wrapper, no compiler."""
    model = plain_model(config, images.device)
    computed = {name: p.to(torch.bfloat16) for name, p in model.named_parameters()}
    loss = F.cross_entropy(torch.func.functional_call(model, computed, (images,)).float(), labels)
    loss.backward()
    return [loss.item(), torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()]


def difference(values: list[float], expected: list[float]) -> str:
    """Return in words how far vitpar's first loss and gradient norm are from the unwrapped ViT's."""
    parts = [
        f"{what} {a:.6f} against {b:.6f} (relative difference {abs(a - b) / abs(b):.1e})"
        for what, a, b in zip(("loss", "gradient norm"), values, expected, strict=True)
    ]
    return ", ".join(parts)
