"""Final weights as safetensors, in the layout that Hugging Face's sharded models use.

    weights/
        model-00001-of-00002.safetensors     whole parameters (of pipeline rank 0), under their names in the whole model
        model-00002-of-00002.safetensors
        model.safetensors.index.json         which file holds which parameter
        config.json                          the model's shape (ViTConfig)
        recipe.toml                          how it was trained, and so how its images are prepared

The folder is written under a temporary name and renamed when complete, so a folder of the right name is whole. Any plan
reads what any other plan wrote: parameters are found by name and cut to the local shard. A run's checkpoint can be read
in its place. What is read is believed only as far as the files bear it out: shapes are compared with what the tensors'
files hold before anything of that size is made.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from vitpar.checkpoint import Checkpoint, load_tensors
from vitpar.checkpoint.atomic import begin, flush, partial, publish
from vitpar.checkpoint.index import AVERAGES, CONFIG, PARAMETERS, RECIPE, damage
from vitpar.checkpoint.index import INDEX as CHECKPOINT_INDEX
from vitpar.checkpoint.reader import read_whole
from vitpar.errors import CheckpointError, DataError, ModelError
from vitpar.io import read_text
from vitpar.launch.world_group import all_gather_json, barrier
from vitpar.limits import MAX_JSON_BYTES, MAX_TOML_BYTES
from vitpar.models.config import ViTConfig, config_from_json
from vitpar.models.initial import copy_whole_
from vitpar.models.vit import ViT
from vitpar.parallel import ParallelModel
from vitpar.weights.shards import Shards, read_object, refuse_other_shapes

INDEX = "model.safetensors.index.json"


@torch.no_grad()
def _save(tensors: dict[str, Tensor], path: Path) -> None:
    """Write a safetensors file durably, with the permissions of any new file (safetensors gives 0600)."""
    path.touch()
    mode = path.stat().st_mode
    save_file(tensors, path)
    path.chmod(mode)
    flush(path)


def save_weights(model: ParallelModel, folder: Path, recipe: str) -> None:
    """Write the whole parameters of `model` to `folder`, replacing it. recipe: as TOML. Collective over all ranks."""
    # That gathering over two axes takes two messages is no news to the user, and happens once a save.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    half = partial(folder)
    if dist.get_rank() == 0:
        begin(folder)
    barrier()
    pipe = model.pipe["pp"]
    name = f"model-{pipe.get_local_rank() + 1:05d}-of-{pipe.size():05d}.safetensors"
    leader = model.pipe.get_local_rank("stage") == 0
    whole = {}
    for parameter_name, parameter in model.named_parameters():
        value = _whole(parameter, model.device)
        if leader:
            whole[parameter_name] = value.detach().cpu().contiguous()
    if leader:
        _save(whole, half / name)
    files = all_gather_json(dict.fromkeys(whole, name))
    if dist.get_rank() == 0:
        weight_map = {key: file for part in files for key, file in part.items()}
        _write_texts(half, weight_map, json.dumps(asdict(model.config), indent=1), recipe)
    barrier()
    if dist.get_rank() == 0:
        publish(folder)
    barrier()


def _whole(parameter: Tensor, device: torch.device) -> Tensor:
    """Gather a parameter. device: where the mesh's groups can send, which is not where offloaded parameters are."""
    if not isinstance(parameter, DTensor):
        return parameter
    return DTensor(parameter._local_tensor.to(device), parameter._spec, requires_grad=False).full_tensor()


def refuse_used(folder: Path) -> None:
    """Raises CheckpointError for a folder that is not new or empty."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CheckpointError(f"'{folder}' exists and is not empty: name another folder, or remove it")


def write_weights(
    folder: Path,
    sizes: Mapping[str, int],
    read: Callable[[str], Tensor],
    *,
    config: str,
    recipe: str,
    shard_bytes: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Path]:
    """Write the tensors that `read` gives to the new `folder`, whole or not at all, by one process; in files of
    `shard_bytes` at most, or of one tensor. Returns the files of tensors.

    sizes: bytes of each, by name. progress: told how many tensors of how many are done. config, recipe: the text of
    these files. Raises CheckpointError for a folder that is not empty and for what cannot be written.
    """
    refuse_used(folder)
    shards: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if shards[-1] and filled + size > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    half, files, done = partial(folder), dict[str, str](), 0
    try:
        begin(folder)
        for number, inside in enumerate(shards, start=1):
            file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            whole = {}
            for name in inside:
                whole[name] = read(name)
                done += 1
                progress(done, len(sizes))
            _save(whole, half / file)
            files |= dict.fromkeys(whole, file)
        _write_texts(half, files, config, recipe)
        publish(folder)
    except OSError as error:
        raise CheckpointError(f"'{folder}' cannot be written: {error.strerror or error}") from None
    finally:
        shutil.rmtree(half, ignore_errors=True)
    return [folder / file for file in dict.fromkeys(files.values())]


def _write_texts(folder: Path, weight_map: Mapping[str, str], config: str, recipe: str) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}, indent=1))
    (folder / CONFIG).write_text(config)
    (folder / RECIPE).write_text(recipe)


def export(
    checkpoint: Checkpoint,
    folder: Path,
    *,
    shard_bytes: int,
    averages: bool | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Path]:
    """Write the parameters of a run's `checkpoint` alone to `folder`, as `write_weights` does. Returns the files of
    tensors.

    averages: whether to take the running averages (None: where there are any). Raises CheckpointError for a folder that
    is not empty, averages that were not kept, and what cannot be read or written.
    """
    tensors = checkpoint.index.tensors
    prefix = _best(checkpoint) if averages is None else AVERAGES if averages else PARAMETERS
    names = [name for name in tensors if name.startswith(prefix)]
    if not names:
        raise CheckpointError(f"'{checkpoint.path}' has no running averages: export the parameters themselves")
    sizes = {
        name.removeprefix(prefix): torch.Size(tensors[name].shape).numel()
        * getattr(torch, tensors[name].dtype).itemsize
        for name in names
    }
    try:
        config = read_text(checkpoint.path / CONFIG, MAX_JSON_BYTES)
        recipe = read_text(checkpoint.path / RECIPE, MAX_TOML_BYTES)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"'{checkpoint.path}' cannot be read: {error}") from None
    return write_weights(
        folder,
        sizes,
        lambda name: read_whole(checkpoint, f"{prefix}{name}"),
        config=config,
        recipe=recipe,
        shard_bytes=shard_bytes,
        progress=progress,
    )


@dataclass(frozen=True)
class Weights:
    """Whole parameters by name, of saved weights or of a checkpoint (its averages where it has some)."""

    folder: Path
    config: ViTConfig
    read: Callable[[str], Tensor]


def open_weights(folder: Path) -> Weights:
    """Open the weights in `folder`, after comparing config.json with the shapes of the tensors; none is read yet.

    Raises DataError or CheckpointError where `folder` holds neither, or nonsense.
    """
    for name in (CONFIG, RECIPE):
        if not os.path.isfile(folder / name):  # False too for a name that no file can have
            raise DataError(
                f"'{folder}' holds no weights ({name} is missing): give a folder such as runs/…/weights or "
                "runs/…/checkpoints/step_450"
            )
    try:
        config = config_from_json(read_object(folder / CONFIG))
    except ModelError as error:
        raise DataError(f"{CONFIG} in '{folder}' cannot be read: {error}") from None
    if (folder / CHECKPOINT_INDEX).exists():
        checkpoint = Checkpoint.open(folder)
        prefix = _best(checkpoint)
        if wrong := damage(folder, checkpoint.index.files, only_sizes=True):
            raise CheckpointError(f"the checkpoint '{folder}' is damaged: {wrong}")
        tensors = checkpoint.index.tensors.items()
        shapes = {name.removeprefix(prefix): t.shape for name, t in tensors if name.startswith(prefix)}
        weights = Weights(folder, config, lambda name: read_whole(checkpoint, f"{prefix}{name}"))
    else:
        shards = Shards.indexed(folder, INDEX)
        shapes, weights = shards.shapes, Weights(folder, config, shards.read)
    refuse_other_shapes(folder, shapes, parameter_shapes(config, most=len(shapes)), exactly=False)
    return weights


def read_config(folder: Path) -> ViTConfig:
    """The model's shape of saved weights or of a checkpoint. Raises as `open_weights` does."""
    return open_weights(folder).config


def parameter_shapes(config: ViTConfig, most: int) -> dict[str, tuple[int, ...]]:
    """The shape of every parameter of a model, by name, without making any. most: how many there can be. Raises
    DataError for a shape no model can have."""
    if config.depth > most:
        raise DataError(f"{config.name} has {config.depth:,} blocks in words, but only {most:,} tensors: do not use it")
    try:
        with torch.device("meta"):
            return {name: tuple(parameter.shape) for name, parameter in ViT(config).named_parameters()}
    except (RuntimeError, TypeError, OverflowError):  # more elements than a number of 64 bits can count
        raise DataError(f"no model has the sizes that {config.name} is said to have: do not use it") from None


@torch.no_grad()
def load_weights(model: ParallelModel, folder: Path, without: Collection[str] = ()) -> None:
    """Fill `model` from `folder`, whatever plan wrote it; of a checkpoint with running averages it takes these, and
    compares its files with their checksums. Collective.

    without: parameters that are left as they are. Raises DataError or CheckpointError for missing files, names or other
    shapes.
    """
    wanted = {name: p for name, p in model.named_parameters() if name not in without}
    if (folder / CHECKPOINT_INDEX).exists():
        checkpoint = Checkpoint.open_whole(folder)
        prefix = _best(checkpoint)
        load_tensors(folder, {f"{prefix}{name}": p.detach() for name, p in wanted.items()}, checkpoint.index)
        model.parameters_changed()
        return
    shards = Shards.indexed(folder, INDEX)
    for name, parameter in wanted.items():
        if name not in shards.shapes:
            raise DataError(f"'{folder}' lacks the parameter {name}: it was saved from another model")
        if shards.shapes[name] != tuple(parameter.shape):
            raise DataError(
                f"{name} in '{folder}' has shape {list(shards.shapes[name])} where the model has "
                f"{list(parameter.shape)}"
            )
        copy_whole_(parameter, shards.read(name))
    model.parameters_changed()


def _best(checkpoint: Checkpoint) -> str:
    """How the names of those tensors begin that evaluate best: averages, where there are any."""
    return AVERAGES if any(name.startswith(AVERAGES) for name in checkpoint.index.tensors) else PARAMETERS
