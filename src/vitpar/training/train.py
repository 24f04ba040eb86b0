"""Training from Python, without the command line."""

import builtins
import importlib
import sys
from collections.abc import Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import torch.distributed as dist

from vitpar.launch import ALONE, find_world, in_world
from vitpar.launch.world import Device
from vitpar.recipe import Recipe
from vitpar.recipe.request import RecipeRequest
from vitpar.terminal import is_terminal
from vitpar.training.events import Reporter
from vitpar.training.prepare import prepare
from vitpar.training.trainer import Trainer


def train(
    recipe: Recipe | Path | str,
    settings: Mapping[str, object] | None = None,
    *,
    device: Device | None = None,
    run_dir: Path | str | None = None,
    resume: str | None = None,
    verbose: bool | None = None,
    reporter: Reporter | None = None,
) -> dict[str, Any]:
    """Train a recipe in this process and return the summary of the run. Collective over the ranks of the world.

    The world is the process group that exists (of Ray Train, Lightning or your program), which is left as it is; else
    the one that torchrun, srun or mpirun describe; else this process alone. To start several ranks, use a launcher.

    recipe: a recipe, or its file or name (with `settings`).
    settings: values that replace those of the recipe, by dotted key, such as {"train.epochs": 5}.
    device: cpu or cuda; None for cuda where there is a GPU.
    run_dir: folder of the run; None for a new one under runs/.
    resume: "auto" to resume the run in `run_dir` if it exists, or a run or checkpoint to resume.
    verbose: whether to print progress as `vitpar train` does; None to do so on a terminal and in a notebook. The run's
        log.txt has it in any case.
    reporter: receives the events of the run instead.

    Returns the last evaluation, the number of steps, images_per_second, and the folder of the weights. The plan is
    the setting parallel.mesh, dp1 by default.

    Raises UserError for settings, data, plans and devices that do not fit.
    """
    if isinstance(recipe, Recipe) and settings:
        raise TypeError("settings need the path of a recipe: pass them to read_recipe instead")
    request = recipe if isinstance(recipe, Recipe) else RecipeRequest(Path(recipe).expanduser(), settings or {})
    # An engine that made the group may have set only some variables of a launcher, or those of another world.
    ranks = dist.get_world_size() if dist.is_initialized() else (find_world() or ALONE).size
    run = prepare(
        request,
        device,
        run_dir=None if run_dir is None else Path(run_dir).expanduser(),
        resume=resume,
        choose=lambda recipe, config, device, saved: recipe.chosen(config, lambda plan: plan.resolve(ranks)),
    )
    with in_world(run.device_type) as own_device, ExitStack() as stack:
        # Engines forward what their ranks print, so that it is not on a terminal.
        watched = is_terminal(sys.stdout) or hasattr(builtins, "__IPYTHON__")
        if reporter is None and dist.get_rank() == 0 and (watched if verbose is None else verbose):
            # By name: the commands are above the library in the order of imports, and installed with it.
            console = importlib.import_module("vitpar_cli.progress").ConsoleReporter()
            reporter = stack.enter_context(closing(console))
        return Trainer(run, own_device, reporter=reporter or Reporter()).run()
