"""Train with vitpar on the workers of Ray Train, and compute the same losses as `vitpar train`.

    python examples/engines/with_ray.py recipe.toml /shared/runs/mine 2

The arguments are a recipe, the run's folder and the number of workers, which have GPUs if the cluster has some. All
nodes share the folder and the data.
"""

import sys
from pathlib import Path
from typing import Any

import ray
import ray.train
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

import vitpar


def train_on_worker(settings: dict[str, Any]) -> None:
    """Train in the process group that Ray Train made; runs on every worker."""
    # "auto": after a failure Ray starts the workers again, and the run resumes from its newest checkpoint.
    summary = vitpar.train(settings["recipe"], run_dir=settings["run_dir"], resume="auto")
    # Ray records metrics with a checkpoint. It copies the weights to its own storage.
    first = ray.train.get_context().get_world_rank() == 0
    ray.train.report(
        {name: value for name, value in summary.items() if isinstance(value, int | float)},
        checkpoint=Checkpoint.from_directory(summary["weights"]) if first else None,
    )


def main(recipe: str, run_dir: str, workers: int) -> None:
    """Train on `workers` workers and print the metrics that Ray recorded."""
    folder = Path(run_dir).resolve()
    ray.init()
    trainer = TorchTrainer(
        train_on_worker,
        train_loop_config={"recipe": str(Path(recipe).resolve()), "run_dir": str(folder)},
        scaling_config=ScalingConfig(num_workers=workers, use_gpu="GPU" in ray.cluster_resources()),
        run_config=RunConfig(storage_path=f"{folder}-ray", failure_config=FailureConfig(max_failures=3)),
    )
    print(trainer.fit().metrics)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
