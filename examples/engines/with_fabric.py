"""Train with vitpar in the process group of Lightning Fabric, and compute the same losses as `vitpar train`.

    python examples/engines/with_fabric.py recipe.toml runs/mine 2

The arguments are a recipe, the run's folder and the number of processes, one for each GPU where there are some.
"""

import sys

import torch
from lightning_fabric import Fabric

import vitpar


def main(recipe: str, run_dir: str, processes: int) -> None:
    """Start the processes, train in all of them, and print the last evaluation."""
    accelerator = "cuda" if torch.cuda.is_available() else "cpu"
    fabric = Fabric(accelerator=accelerator, devices=processes, strategy="ddp")
    fabric.launch()  # starts the other processes and makes the process group
    summary = vitpar.train(recipe, run_dir=run_dir, device=accelerator, resume="auto")
    fabric.print(f"loss {summary['loss']:.4f} after {summary['steps']} steps")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
