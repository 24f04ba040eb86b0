"""Hosts, data and launchers for the tests of real launchers."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.cluster import Cluster, ended, recipe
from helpers.command_line import started
from helpers.slurm import Slurm

RECIPE = {
    **{"model.name": "vit_custom", "model.image_size": 8, "model.patch_size": 4, "model.embed_dim": 16},
    **{"model.depth": 2, "model.num_heads": 2, "data.path": "data", "data.workers": 0, "train.batch_size": 32},
    **{"train.log_every": 1, "train.eval_every": 1_000_000, "train.compile": False, "optimizer.lr": 1e-3},
}


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the digits, packed, as `data`, and a recipe."""
    folder = tmp_path_factory.mktemp("place")
    code, text = ended(started(folder, ["data", "pack", "digits", "data"]))
    assert code == 0, text
    recipe(folder, RECIPE)
    return folder


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Yield two hosts."""
    cluster = Cluster(tmp_path_factory.mktemp("cluster") / "hosts")
    yield cluster
    cluster.close()


@pytest.fixture(scope="module")
def mpirun() -> str:
    """Return mpirun's path."""
    path = shutil.which("mpirun")
    if path is None:
        pytest.skip("OpenMPI's mpirun is not installed: run tests/clusters/install.sh as root")
    return path


@pytest.fixture(scope="module")
def slurm(hosts: Cluster) -> Slurm:
    """Return a SLURM cluster on the hosts."""
    return Slurm(hosts)
