"""Running average of the parameters."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from vitpar.parallel import ParallelModel
from vitpar.sharded import local


class EMA:
    """Exponential moving average of the parameters, sharded like them.

    ``average = decay · average + (1 - decay) · parameter`` after every step.

    The average starts as the initial parameters. `averaged` temporarily replaces the parameters by it, for evaluation
    and saving. That of a frozen parameter is the parameter itself, in the same memory.

    warmup: whether the decay rises from 0 to `decay`, so that initial parameters are forgotten at once.
    holder: model under the same plan whose parameters are the average, such as a teacher; None for none.
    """

    def __init__(
        self, model: ParallelModel, decay: float, warmup: bool = False, holder: ParallelModel | None = None
    ) -> None:
        self._model, self._warmup = model, warmup
        self.most = decay
        """Decay of the settings, from the next update on."""
        self._shards = shards = {name: local(p.detach()) for name, p in model.named_parameters()}
        self._trained = {name: shards[name] for name, p in model.named_parameters() if p.requires_grad}
        self.average = {name: shard.clone() if name in self._trained else shard for name, shard in shards.items()}
        if holder is not None:
            self.average = {name: local(p.detach()) for name, p in holder.named_parameters()}
            self.restart()

    @torch.no_grad()
    def restart(self) -> None:
        """Reset the average to the present parameters."""
        apart = [name for name, shard in self.average.items() if shard is not self._shards[name]]
        if apart:
            torch._foreach_copy_([self.average[name] for name in apart], [self._shards[name] for name in apart])

    def decay(self, step: int) -> float:
        """Return the decay after update number `step`, counted from 1.

        With warm-up it is 1 - step^(-2/3), at most the decay of the settings, as in timm's ModelEmaV3.
        """
        return min(self.most, 1 - step ** (-2 / 3)) if self._warmup else self.most

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Update the average with the present parameters, after update number `step`, counted from 1."""
        if self._trained:
            averages = [self.average[name] for name in self._trained]
            torch._foreach_lerp_(averages, list(self._trained.values()), 1.0 - self.decay(step))

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Replace the parameters by their averages inside the ``with``, and restore them after it."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for name, shard in self._trained.items():
            kept = shard.clone()
            shard.copy_(self.average[name])
            self.average[name].copy_(kept)
        self._model.parameters_changed()
