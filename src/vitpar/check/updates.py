"""Formulas of all optimizers on complete tensors, for the reference training.

Sources: AdamW arXiv 1711.05101, Adam arXiv 1412.6980, Lion arXiv 2302.06675, LAMB arXiv 1904.00962, LARS arXiv
1708.03888, Muon kellerjordan.github.io/posts/muon and arXiv 2502.16982, Adafactor arXiv 1804.04235 with the changes of
torch.optim.Adafactor.
"""

from itertools import accumulate

import torch
from torch import Tensor

from vitpar.models.config import ModelConfig
from vitpar.recipe.sections.training import OptimizerSection


def _rms(x: Tensor) -> float:
    return x.square().mean().sqrt().item()


class Updates:
    """Reference implementation of a recipe's optimizer.

    config: says which maps a weight holds, each of which Muon orthogonalizes separately, and how many layers are above
        a parameter, by which its learning rate decays.
    """

    def __init__(self, settings: OptimizerSection, config: ModelConfig) -> None:
        self._settings, self._hidden, self._layers_above = settings, config.hidden_matrices, config.layers_above
        self._memory: dict[str, dict[str, Tensor]] = {}
        self._times = 0

    @torch.no_grad()
    def step(self, parameters: dict[str, Tensor], gradients: dict[str, Tensor], lr: float) -> None:
        """Update `parameters` in place."""
        self._times += 1
        s = self._settings
        for name, x in parameters.items():
            g = gradients[name]
            memory = self._memory.setdefault(name, {})
            matrix = x.dim() in (2, 4)  # biases, norms, tokens, positions and scales neither decay nor are adapted
            decay = s.weight_decay if matrix else 0.0
            rate = lr * s.layer_decay ** self._layers_above(name)
            if s.name == "sgd":
                x -= rate * self._momentum(memory, g + decay * x)
            elif s.name == "adam":
                x -= rate * self._adam(memory, g + decay * x)
            elif s.name == "lion":
                x -= rate * (self._lion(memory, g) + decay * x)
            elif s.name == "adafactor":
                size = max(1e-3, _rms(x)) * min(rate, self._times**-0.5)
                x -= rate * decay * x + size * self._adafactor(memory, g)
            elif s.name == "lars":
                ratio = 1.0
                if matrix and x.norm() > 0 and g.norm() > 0:
                    ratio = s.trust_coefficient * x.norm() / (g.norm() + decay * x.norm())
                x -= rate * self._momentum(memory, ratio * (g + decay * x))
            elif s.name == "muon" and name in self._hidden:
                x -= rate * (self._muon(name, memory, g) + decay * x)
            else:  # adamw, lamb, and muon's other parameters
                step = self._adam(memory, g) + decay * x
                adapts = s.name == "lamb" and matrix and x.norm() > 0 and step.norm() > 0
                x -= rate * (x.norm() / step.norm() if adapts else 1.0) * step

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

    def _lion(self, memory: dict[str, Tensor], g: Tensor) -> Tensor:
        one, two = self._settings.betas
        before = memory.get("m", torch.zeros_like(g))
        memory["m"] = two * before + (1 - two) * g
        return (one * before + (1 - one) * g).sign()

    def _adafactor(self, memory: dict[str, Tensor], g: Tensor) -> Tensor:
        newest, eps = self._times**-0.8, torch.finfo(g.dtype).eps
        memory["v"] = memory.get("v", 0.0) * (1 - newest) + newest * g * g
        v = memory["v"]
        if v.dim() > 1:  # of v only the means over rows and over columns are used
            rows, columns = v.mean(-1, keepdim=True), v.mean(-2, keepdim=True)
            v = rows * columns / rows.mean(-2, keepdim=True).clamp(min=eps)
        u = g / v.sqrt().clamp(min=eps)
        return u / max(1.0, _rms(u))

    def _muon(self, name: str, memory: dict[str, Tensor], g: Tensor) -> Tensor:
        s = self._settings
        memory["m"] = s.momentum * memory.get("m", torch.zeros_like(g)) + (1 - s.momentum) * g
        direction = s.momentum * memory["m"] + (1 - s.momentum) * g if s.nesterov else memory["m"]
        stacked, orthogonal = self._hidden[name] or (len(direction),), torch.empty_like(direction)
        place = torch.arange(len(direction)) % sum(stacked)  # in a group of rows, such as (q|k|v, feature) of a head
        ends = list(accumulate(stacked))
        for start, end in zip([0, *ends], ends, strict=False):
            rows = (start <= place) & (place < end)
            orthogonal[rows] = self._orthogonal(direction[rows])
        return orthogonal

    def _orthogonal(self, matrix: Tensor) -> Tensor:
        """Return `matrix` after the Newton-Schulz iterations x ← (a + b·xxᵀ + c·(xxᵀ)²)·x.

        It is multiplied by a factor that adjusts the learning rate to its shape.
        """
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
