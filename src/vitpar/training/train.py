"""Training from Python, without the command line."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from vitpar.launch import ALONE, find_world, join, leave
from vitpar.launch.world import Device
from vitpar.training.events import Reporter
from vitpar.training.input import open_data, transforms
from vitpar.training.prepare import prepared
from vitpar.training.recipe import Recipe, read_recipe
from vitpar.training.recipe.machine import on_device, refuse_huge_batch
from vitpar.training.saving.resume import counting_images, resumed
from vitpar.training.tracking.tracked_run import refuse_missing
from vitpar.training.trainer import Trainer


def train(
    recipe: Recipe | Path | str,
    settings: Mapping[str, object] | None = None,
    *,
    device: Device | None = None,
    run_dir: Path | str | None = None,
    resume: str | None = None,
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
    reporter: receives the events of the run; None for none. The run's log.txt has them in any case.

    Returns the last evaluation, the number of steps, images_per_second, and the folder of the weights. The plan is
    the setting parallel.mesh, dp1 by default.

    Raises UserError for settings, data, plans and devices that do not fit.
    """
    if not isinstance(recipe, Recipe):
        recipe = read_recipe(Path(recipe), settings)
    elif settings:
        raise TypeError("settings need the path of a recipe: pass them to read_recipe instead")
    refuse_missing(recipe.track.trackers)
    device_type: Device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    given = dist.is_initialized()
    world = find_world() or ALONE
    ranks = dist.get_world_size() if given else world.size
    resumed_run = resumed(resume, None if run_dir is None else Path(run_dir))
    recipe = on_device(counting_images(recipe, resumed_run), device_type)
    config = recipe.config(open_data(recipe)[0].num_classes)
    plan = recipe.chosen(config, lambda plan: plan.resolve(ranks)).plan
    transforms(recipe, config.image_size)  # refuses wrong settings before anything starts
    refuse_huge_batch(recipe, config)
    own_device = _device(device_type) if given else join(world, device_type)
    folder = Path(run_dir) if run_dir is not None else resumed_run.run
    try:
        run = prepared(recipe, plan, device_type, run_dir=folder, resume=resumed_run.source)
        trainer = Trainer(run, own_device, reporter=reporter or Reporter())
        summary = trainer.run()
    except BaseException:
        if not given and ranks == 1:  # with other ranks, which may be gone, leaving could hang
            leave()
        raise
    if not given:
        leave()
    return summary


def _device(device_type: Device) -> torch.device:
    """Return the device that the owner of the process group has chosen."""
    return torch.device("cuda", torch.cuda.current_device()) if device_type == "cuda" else torch.device("cpu")
