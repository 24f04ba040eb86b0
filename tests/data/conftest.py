"""Fixtures of the tests of data."""

import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from helpers.tiny_images import write_tree
from vitpar.data.shards.pack import pack


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pack 21 training and 9 validation images of 12 x 10 pixels in 3 classes."""
    folder = tmp_path_factory.mktemp("data")
    write_tree(folder / "source")
    pack(folder / "source", folder / "packed", shard_samples=8)
    return folder / "packed"


@pytest.fixture
def seeded() -> Iterator[None]:
    """Seed the random numbers of timm and torchvision, and restore their state afterwards."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    yield
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])
