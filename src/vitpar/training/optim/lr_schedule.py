"""The learning rate of every step."""

import math
from dataclasses import dataclass

from vitpar.strategy.words import count


@dataclass(frozen=True)
class CosineWithWarmup:
    """Linear from 0 to `peak` over `warmup_steps`, then half a cosine from `peak` down towards `min_lr`, which
    one step more than `total_steps` would reach."""

    peak: float
    total_steps: int
    warmup_steps: int = 0
    min_lr: float = 0.0

    @property
    def warning(self) -> str | None:
        """What to tell the user of a rate that never falls."""
        if self.warmup_steps < self.total_steps:
            return None
        warmup = count(self.warmup_steps, "step")
        return f"the warm-up of {warmup} is as long as the run or longer: the learning rate never falls"

    def __call__(self, step: int) -> float:
        """The rate of update number `step`, counted from 1."""
        if step <= self.warmup_steps:
            return self.peak * step / self.warmup_steps
        progress = min(1.0, (step - 1 - self.warmup_steps) / max(1, self.total_steps - self.warmup_steps))
        return self.min_lr + (self.peak - self.min_lr) * (1 + math.cos(math.pi * progress)) / 2
