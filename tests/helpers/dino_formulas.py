"""The loss of self-distillation by formulas of its own, crop by crop, on plain models of all layers."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitpar.models.dino.config import DINOConfig
from vitpar.models.layers import LayeredModel


def features(model: LayeredModel, config: DINOConfig, pixels: Tensor, masks: Tensor) -> tuple[list[Tensor], ...]:
    """Return class tokens of each crop, and patches of the global ones, after the norm."""
    layers, start, classes, patches = model.layers(), 0, [], []
    x = layers["embed"](pixels, masks=masks)
    for name in config.blocks:
        x = layers[name](x)
    for crops in config.crops:
        for _ in range(crops.count):
            tokens = layers["head"].norm(x[:, start : start + crops.tokens])  # type: ignore[operator]
            start += crops.tokens
            classes.append(tokens[:, 0])
            patches.append(tokens[:, config.prefix_tokens :])
    return classes, patches[:2]


def scores(head: nn.Module, x: Tensor) -> Tensor:
    """Return the scores of prototypes by torch's weight norm."""
    p = dict(head.named_parameters())
    for number in (1, 2, 3):
        x = F.linear(x, p[f"mlp{number}.weight"], p[f"mlp{number}.bias"])
        x = F.gelu(x) if number < 3 else F.normalize(x, dim=-1)
    return x @ torch._weight_norm(p["fc.weight"], p["lengths.weight"][:, None], 0).T


def spread(z: Tensor) -> Tensor:
    """Return the probabilities of rows over prototypes by Sinkhorn-Knopp on a matrix."""
    q = z.exp() / z.exp().sum()
    for _ in range(3):
        q = q / q.sum(0) / q.shape[1]
        q = q / q.sum(1, keepdim=True) / q.shape[0]
    return q * q.shape[0]


def loss(
    student: LayeredModel,
    teacher: LayeredModel,
    configs: tuple[DINOConfig, DINOConfig],
    pixels: Tensor,
    masks: Tensor,
    temperature: float,
    center: Tensor | None,
) -> Tensor:
    """Return the mean loss of a batch, one group of KoLeo. center: of class tokens and of patches; None for none."""
    heads = [[model.layers()["head"].class_head, model.layers()["head"].patch_head] for model in (student, teacher)]
    of_classes, of_patches = heads[0][0], heads[0][1] or heads[0][0]
    classes, patches = features(student, configs[0], pixels, masks)
    with torch.no_grad():
        taught, wanted = features(teacher, configs[1], pixels[..., : configs[1].input.shape[-1]], masks)
        known = scores(heads[1][0], torch.cat(taught))
        hidden = scores(heads[1][1] or heads[1][0], torch.cat([wanted[crop][masks[:, crop]] for crop in (0, 1)]))
        known, hidden = (
            spread(z / temperature) if center is None else ((z - center[i]) / temperature).softmax(-1)
            for i, z in enumerate((known, hidden))
        )
    both, total = known.chunk(2), torch.zeros((), dtype=pixels.dtype)
    pairs = [(s, t) for s in range(len(classes)) for t in (0, 1) if s != t]
    for s, t in pairs:
        total = total + F.cross_entropy(scores(of_classes, classes[s]) / 0.1, both[t]) / len(pairs)
    start = 0
    for crop in (0, 1):
        for image, mask in enumerate(masks[:, crop]):
            if count := int(mask.sum()):
                found = scores(of_patches, patches[crop][image][mask]) / 0.1
                total = total + F.cross_entropy(found, hidden[start : start + count]) / (2 * len(masks))
                start += count
        x = F.normalize(classes[crop], dim=-1)
        nearest = (torch.cdist(x, x) + torch.eye(len(x), dtype=x.dtype) * 9).argmin(1)
        total = total - 0.1 * (F.pairwise_distance(x, x[nearest], eps=1e-8) + 1e-8).log().mean()
    return total
