"""Train with vitpar in the process group of Accelerate, and compute the same losses as `vitpar train`.

    accelerate launch --num_processes 2 examples/engines/with_accelerate.py recipe.toml runs/mine

The arguments are a recipe and the run's folder. Accelerate starts processes on CPUs through MPI only: use torchrun
there.
"""

import sys

import torch
from accelerate import Accelerator

import vitpar


def main(recipe: str, run_dir: str) -> None:
    """Train in all processes that Accelerate started, and print the last evaluation."""
    accelerator = Accelerator(cpu=not torch.cuda.is_available())  # makes the process group
    summary = vitpar.train(recipe, run_dir=run_dir, device=accelerator.device.type, resume="auto")
    accelerator.print(f"loss {summary['loss']:.4f} after {summary['steps']} steps")
    accelerator.end_training()


if __name__ == "__main__":
    main(*sys.argv[1:])
