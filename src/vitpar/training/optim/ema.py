"""An exponential moving average of the parameters, kept shard by shard like the parameters themselves."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from vitpar.parallel import ParallelModel
from vitpar.training.optim.optimizer import local


class EMA:
    """``average = decay · average + (1 - decay) · parameter`` after every step.

    The average starts as the initial parameters. `averaged` puts it in their place for a while, for evaluation and
    saving. warmup: whether the decay rises from 0 to `decay`, so that initial parameters are forgotten at once.
    """

    def __init__(self, model: ParallelModel, decay: float, warmup: bool = False) -> None:
        self._model, self._decay, self._warmup = model, decay, warmup
        self._shards = {name: local(p.detach()) for name, p in model.named_parameters()}
        self.average = {name: shard.clone() for name, shard in self._shards.items()}

    @torch.no_grad()
    def restart(self) -> None:
        """Begin with the parameters as they are."""
        torch._foreach_copy_(list(self.average.values()), list(self._shards.values()))

    def decay(self, step: int) -> float:
        """Return the decay after update number `step`, counted from 1.

        With a warm-up 1 - step^(-2/3), at most the decay that was asked for, as in timm's ModelEmaV3.
        """
        return min(self._decay, 1 - step ** (-2 / 3)) if self._warmup else self._decay

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Take the present parameters into the average, after update number `step`, counted from 1."""
        torch._foreach_lerp_(list(self.average.values()), list(self._shards.values()), 1.0 - self.decay(step))

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """The model with the averaged parameters inside the ``with``, with its own again after it."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for name, shard in self._shards.items():
            kept = shard.clone()
            shard.copy_(self.average[name])
            self.average[name].copy_(kept)
        self._model.parameters_changed()
