"""Random choice of the visible patches, by each sample's key: the same under every plan, and when a run resumes."""

import torch
from torch import Tensor

from vitpar.models.keyed_random import at_place, keyed_uniform

PLACE = -1
"""Place of the choice among the uses of random numbers in the model (``vitpar.models.keyed_random.at_place``)."""


def masking_noise(keys: Tensor, patches: int) -> Tensor:
    """Return a random number of each patch, float32 [batch, patches]; the patches with the smallest stay visible.

    keys: int64 [batch].
    """
    return keyed_uniform(at_place(keys, torch.full_like(keys, PLACE)), [patches])


def shuffled(keys: Tensor, patches: int) -> Tensor:
    """Return the patches in random order, int64 [batch, patches]. The first ones are visible. keys: int64 [batch]."""
    return masking_noise(keys, patches).argsort(dim=1, stable=True)


def masked(keys: Tensor, patches: int, visible: int) -> Tensor:
    """Return whether each patch is masked, bool [batch, patches]. keys: int64 [batch]."""
    return shuffled(keys, patches).argsort(dim=1) >= visible
