"""The examples for engines that start ranks themselves: each runs, with the losses of vitpar's own launcher."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from helpers.paths import ROOT
from helpers.small_data import pack_small
from helpers.trained import recipe_of, rows

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]
EXAMPLES = ROOT / "examples" / "engines"
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2")
WHY = "make test-engines installs it"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a recipe of two ranks, and the run of it that vitpar itself started."""
    folder = tmp_path_factory.mktemp("engines")
    # An environment on top of another one has the modules of that, but not its scripts.
    (folder / "torchrun").write_text(f'#!/bin/sh\nexec {sys.executable} -m torch.distributed.run "$@"\n')
    (folder / "torchrun").chmod(0o755)
    (folder / "recipe.toml").write_text(recipe_of(pack_small(folder), "fsdp2").to_toml())
    run(folder, "-m", "vitpar_cli.main", "train", "--recipe", "recipe.toml", "--run-dir", "own", "--device", "cpu")
    return folder


def run(folder: Path, *words: str, **variables: str) -> str:
    """Run Python with `words` in `folder`, without GPUs, and return what it prints."""
    return finished([sys.executable, *words], folder, variables)


def finished(command: list[str], folder: Path, variables: dict[str, str]) -> str:
    """Run `command` with `folder` first in PATH, and return what it prints."""
    path = f"{folder}:{os.environ['PATH']}"
    usual = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PATH": path, "RAY_USAGE_STATS_ENABLED": "0"}
    done = subprocess.run(command, cwd=folder, env=os.environ | usual | variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def assert_same_losses(folder: Path, name: str) -> None:
    """Fail unless the run `name` has the losses of the run that vitpar started, bit by bit."""
    own = rows(folder / "own")
    assert len(own) == 6 and rows(folder / name) == own


def test_ray_train(folder: Path) -> None:
    pytest.importorskip("ray.train", reason=WHY)
    said = run(folder, str(EXAMPLES / "with_ray.py"), "recipe.toml", "ray", "2")
    assert_same_losses(folder, "ray")
    assert "'steps': 6" in said, "Ray has recorded the summary"
    assert list(folder.glob("ray-ray/*/*/*.safetensors")), "and the weights"


def test_lightning_fabric(folder: Path) -> None:
    pytest.importorskip("lightning_fabric", reason=WHY)
    said = run(folder, str(EXAMPLES / "with_fabric.py"), "recipe.toml", "fabric", "2")
    assert_same_losses(folder, "fabric")
    assert said.count("after 6 steps") == 1


def test_accelerate(folder: Path) -> None:
    pytest.importorskip("accelerate", reason=WHY)
    said = run(folder, *TORCHRUN, "--standalone", str(EXAMPLES / "with_accelerate.py"), "recipe.toml", "accelerate")
    assert_same_losses(folder, "accelerate")
    assert said.count("after 6 steps") == 1


def test_kubeflow_train_job(folder: Path) -> None:
    yaml = pytest.importorskip("yaml")
    api = pytest.importorskip("kubeflow_trainer_api.models", reason=WHY)
    job: dict[str, Any] = yaml.safe_load((EXAMPLES / "kubeflow.yaml").read_text())
    assert api.TrainerV1alpha1TrainJob.from_dict(job).to_dict() == job, "no key is unknown to the API"
    trainer = job["spec"]["trainer"]
    words = [re.sub("^/shared/runs/mine$", "kubeflow", word) for word in trainer["command"] + trainer["args"]]
    words = [re.sub("^/shared/", "", word) for word in words]
    pet = {"PET_NNODES": "1", "PET_NPROC_PER_NODE": "2", "PET_NODE_RANK": "0"}
    pet |= {"PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": "29621"}
    finished([str(folder / words[0]), *words[1:]], folder, pet)
    assert_same_losses(folder, "kubeflow")


def test_skypilot_task(folder: Path) -> None:
    sky = pytest.importorskip("sky", reason=WHY)
    task = sky.Task.from_yaml(str(EXAMPLES / "skypilot.yaml"))
    assert task.num_nodes == 2 and task.run
    node = {"SKYPILOT_NODE_RANK": "0", "SKYPILOT_NUM_NODES": "1", "SKYPILOT_NUM_GPUS_PER_NODE": "2"}
    own = {"SKYPILOT_NODE_IPS": "127.0.0.1\n", "RECIPE": "recipe.toml", "RUN_DIR": "sky"}
    finished(["bash", "-c", task.run], folder, node | own)
    assert_same_losses(folder, "sky")
