"""Final weights as safetensors, one file for each pipeline rank, in the layout that Hugging Face's sharded models use.

    weights/
        model-00001-of-00002.safetensors     whole parameters of pipeline rank 0, under their names in the whole model
        model-00002-of-00002.safetensors
        model.safetensors.index.json         which file holds which parameter
        config.json                          the model's shape (ViTConfig)
        recipe.toml                          how it was trained, and so how its images are prepared

The folder is written under a temporary name and renamed when complete, so a folder of the right name is whole. Any plan
reads what any other plan wrote: parameters are found by name and cut to the local shard. A run's checkpoint can be read
in its place.
"""

import json
import logging
import os
import shutil
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

from vitpar.checkpoint import Checkpoint, load_tensors
from vitpar.checkpoint.index import INDEX as CHECKPOINT_INDEX
from vitpar.errors import DataError
from vitpar.models.config import ViTConfig
from vitpar.models.initial import copy_whole_
from vitpar.parallel import ParallelModel
from vitpar.train.recipe import Recipe
from vitpar.train.training_state import AVERAGES, CONFIG, PARAMETERS, RECIPE

INDEX = "model.safetensors.index.json"


@torch.no_grad()
def save_weights(model: ParallelModel, folder: Path, recipe: Recipe) -> None:
    """Write the whole parameters of `model` to `folder`, replacing it. Collective over all ranks."""
    # That gathering over two axes takes two messages is no news to the user, and happens once a save.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    partial = folder.with_name(folder.name + ".partial")
    if dist.get_rank() == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    dist.barrier()
    pipe = model.pipe["pp"]
    name = f"model-{pipe.get_local_rank() + 1:05d}-of-{pipe.size():05d}.safetensors"
    leader = model.pipe.get_local_rank("stage") == 0
    whole = {}
    for parameter_name, parameter in model.named_parameters():
        value = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        if leader:
            whole[parameter_name] = value.detach().cpu().contiguous()
    if leader:
        save_file(whole, partial / name)
    files: list[dict[str, str]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(files, dict.fromkeys(whole, name))
    if dist.get_rank() == 0:
        weight_map = {key: file for part in files for key, file in part.items()}
        (partial / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}, indent=1))
        (partial / CONFIG).write_text(json.dumps(asdict(model.config), indent=1))
        (partial / RECIPE).write_text(recipe.to_toml())
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(partial, folder)
    dist.barrier()


def read_config(folder: Path) -> ViTConfig:
    """The model's shape of saved weights or of a checkpoint. Raises DataError when `folder` holds neither."""
    for name in (CONFIG, RECIPE):
        if not (folder / name).is_file():
            raise DataError(
                f"'{folder}' holds no weights ({name} is missing): give a folder such as runs/…/weights or "
                "runs/…/checkpoints/step_450"
            )
    try:
        return ViTConfig(**json.loads((folder / CONFIG).read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise DataError(f"{CONFIG} in '{folder}' cannot be read: {error}") from None


@torch.no_grad()
def load_weights(model: ParallelModel, folder: Path) -> None:
    """Fill `model` from `folder`, whatever plan wrote it; of a checkpoint with running averages it takes these, and
    compares its files with their checksums. Collective.

    Raises DataError or CheckpointError for missing files, names or other shapes.
    """
    if (folder / CHECKPOINT_INDEX).exists():
        index = Checkpoint.open_whole(folder).index
        prefix = AVERAGES if any(name.startswith(AVERAGES) for name in index.tensors) else PARAMETERS
        named = {f"{prefix}{name}": parameter.detach() for name, parameter in model.named_parameters()}
        load_tensors(folder, named, index)
        model.parameters_changed()
        return
    try:
        weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
        for name, parameter in model.named_parameters():
            if name not in weight_map:
                raise DataError(f"'{folder}' lacks the parameter {name}: it was saved from another model")
            file = Path(weight_map[name]).name  # never a path outside the folder
            with safe_open(folder / file, framework="pt") as weights:
                whole = weights.get_tensor(name)
            if whole.shape != parameter.shape:
                raise DataError(
                    f"{name} in '{folder}' has shape {list(whole.shape)} where the model has {list(parameter.shape)}"
                )
            copy_whole_(parameter, whole)
    except (OSError, json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, SafetensorError) as error:
        raise DataError(f"the weights in '{folder}' cannot be read: {error}") from None
    model.parameters_changed()
