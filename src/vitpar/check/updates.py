"""The optimizers' formulas on whole tensors in one process, to compare the sharded optimizers with. They share no code.

Sources: AdamW arXiv 1711.05101, LAMB arXiv 1904.00962, LARS arXiv 1708.03888, Muon
kellerjordan.github.io/posts/muon and arXiv 2502.16982.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vitpar.training.recipe.optimizer_section import OptimizerSection


class Updates:
    """The optimizer of a recipe. heads: attention heads, which tell queries, keys and values of a matrix apart."""

    def __init__(self, settings: OptimizerSection, heads: int) -> None:
        self._settings, self._heads = settings, heads
        self._memory: dict[str, dict[str, Tensor]] = {}
        self._times = 0

    @torch.no_grad()
    def step(self, parameters: dict[str, Tensor], gradients: dict[str, Tensor], lr: float) -> None:
        """Move `parameters`, in place."""
        self._times += 1
        s = self._settings
        for name, x in parameters.items():
            g = gradients[name]
            memory = self._memory.setdefault(name, {})
            matrix = x.dim() == 2  # biases, norms, tokens, positions and layer scales neither decay nor are adapted
            decay = s.weight_decay if matrix else 0.0
            if s.name == "sgd":
                x -= lr * self._momentum(memory, g + decay * x)
            elif s.name == "lars":
                ratio = 1.0
                if matrix and x.norm() > 0 and g.norm() > 0:
                    ratio = s.trust_coefficient * x.norm() / (g.norm() + decay * x.norm())
                x -= lr * self._momentum(memory, ratio * (g + decay * x))
            elif s.name == "muon" and matrix and name.startswith("blocks."):
                x -= lr * (self._muon(name, memory, g) + decay * x)
            else:  # adamw, lamb, and muon's other parameters
                step = self._adam(memory, g) + decay * x
                adapts = s.name == "lamb" and matrix and x.norm() > 0 and step.norm() > 0
                x -= lr * (x.norm() / step.norm() if adapts else 1.0) * step

    def _momentum(self, memory: dict[str, Tensor], g: Tensor) -> Tensor:
        mu = self._settings.momentum
        memory["m"] = mu * memory["m"] + g if "m" in memory else g.clone()
        return g + mu * memory["m"] if self._settings.nesterov else memory["m"]

    def _adam(self, memory: dict[str, Tensor], g: Tensor) -> Tensor:
        one, two = self._settings.betas
        memory["m"] = one * memory.get("m", torch.zeros_like(g)) + (1 - one) * g
        memory["v"] = two * memory.get("v", torch.zeros_like(g)) + (1 - two) * g * g
        m, v = memory["m"] / (1 - one**self._times), memory["v"] / (1 - two**self._times)
        return m / (v.sqrt() + self._settings.eps)

    def _muon(self, name: str, memory: dict[str, Tensor], g: Tensor) -> Tensor:
        s = self._settings
        memory["m"] = s.momentum * memory.get("m", torch.zeros_like(g)) + (1 - s.momentum) * g
        direction = s.momentum * memory["m"] + (1 - s.momentum) * g if s.nesterov else memory["m"]
        if not name.endswith("attn.qkv.weight"):
            return self._orthogonal(direction)
        whole = direction.unflatten(0, (self._heads, 3, -1))  # rows are (head, q|k|v, feature)
        maps = [self._orthogonal(whole[:, part].flatten(0, 1)).unflatten(0, (self._heads, -1)) for part in range(3)]
        return torch.stack(maps, 1).flatten(0, 2)

    def _orthogonal(self, matrix: Tensor) -> Tensor:
        """The Newton-Schulz iteration x ← (a + b·xxᵀ + c·(xxᵀ)²)·x, and the factor of the learning rate."""
        s, (rows, columns) = self._settings, matrix.shape
        factor = max(1.0, rows / columns) ** 0.5 if s.adjust_lr_fn == "original" else 0.2 * max(rows, columns) ** 0.5
        x = matrix / matrix.norm().clamp(min=1e-7)
        if x.is_cuda and x.dtype is not torch.float64:
            x = x.bfloat16()
        for _ in range(s.ns_steps):
            square = x @ x.mT if rows <= columns else x.mT @ x
            polynomial = -4.7750 * square + 2.0315 * square @ square
            x = 3.4445 * x + (polynomial @ x if rows <= columns else x @ polynomial)
        return factor * x.to(matrix.dtype)
