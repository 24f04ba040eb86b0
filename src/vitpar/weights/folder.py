"""Final weights as safetensors, in the layout that Hugging Face's sharded models use.

    weights/
        model-00001-of-00002.safetensors     unsharded parameters of pipeline rank 0, by their names in the full model
        model-00002-of-00002.safetensors
        model.safetensors.index.json         file of each parameter
        config.json                          configuration of the model (ModelConfig)
        recipe.toml                          recipe of the training, which also says how images are prepared
        classes.json                         names of the classes, where the data have names

The folder is written under a temporary name and renamed when complete, so a folder of the final name is complete. Any
plan can read what any other plan wrote: parameters are found by name and cut to the local shard. A run's checkpoint can
be read in place of such a folder. Shapes in config.json are not trusted: they are compared with the tensors in the
files before any memory of that size is allocated.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from vitpar.checkpoint.atomic import begin, flush, partial, publish
from vitpar.checkpoint.folder import Checkpoint
from vitpar.checkpoint.index import AVERAGES, CLASSES, CONFIG, PARAMETERS, RECIPE, damage
from vitpar.checkpoint.index import INDEX as CHECKPOINT_INDEX
from vitpar.checkpoint.reader import load_tensors, read_whole
from vitpar.errors import CheckpointError, DataError, ModelError
from vitpar.io import open_regular, read_text, writing
from vitpar.launch.world_group import all_gather_json, barrier
from vitpar.limits import MAX_JSON_BYTES, MAX_TOML_BYTES
from vitpar.models.config import ModelConfig
from vitpar.models.families import config_from_json, config_to_json
from vitpar.models.initial import copy_whole_
from vitpar.models.lora import LoRA, adapters_of
from vitpar.models.lora_layers import merged_parameter
from vitpar.parallel import ParallelModel
from vitpar.weights.shards import Shards, read_object, read_weight_map, refuse_other_shapes

INDEX = "model.safetensors.index.json"
"""File name of the index."""
SINGLE = "model.safetensors"
"""File name of all tensors where other libraries expect one file."""
_ENDS = 1 << 20
"""Bytes at both ends of a file that its fingerprint covers."""


@torch.no_grad()
def _save(tensors: dict[str, Tensor], path: Path) -> None:
    """Write a safetensors file durably, with the default permissions of new files; safetensors would set 0600."""
    path.touch()
    mode = path.stat().st_mode
    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(errno.EIO, str(error), str(path)) from None
    path.chmod(mode)
    flush(path)


def save_weights(model: ParallelModel, folder: Path, recipe: str, class_names: Sequence[str] | None = None) -> None:
    """Write the unsharded parameters of `model` to `folder`, replacing it. Collective over all ranks.

    Adapters are merged into the parameters that they adapt.

    recipe: recipe of the run, as TOML.
    class_names: names of the classes; None for none.
    """
    # torch warns that gathering over two mesh axes takes two collectives. That is expected, and happens once per save.
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
        if parameter_name in model.config.shared:
            continue  # equal to its owner
        value: Tensor = parameter
        if isinstance(parameter, DTensor):
            # An offloaded parameter is in host memory: it is copied to the device of the mesh's process groups first.
            there = parameter._local_tensor.to(model.device)
            value = DTensor(there, parameter._spec, requires_grad=False).full_tensor()
        if leader:
            whole[parameter_name] = value.detach().cpu().contiguous()
    adapters = {key: whole.pop(key) for key in adapters_of(model.config) & whole.keys()}
    if leader and isinstance(model.config, LoRA):
        whole = {key: merged_parameter(model.config, key, value, adapters.__getitem__) for key, value in whole.items()}
    if leader:
        _save(whole, half / name)
    files = all_gather_json(dict.fromkeys(whole, name))
    if dist.get_rank() == 0:
        weight_map = {key: file for part in files for key, file in part.items()}
        texts = {CONFIG: json.dumps(config_to_json(model.config.unadapted), indent=1), RECIPE: recipe}
        names = {} if class_names is None else {CLASSES: json.dumps(class_names)}
        _write_others(half, {**texts, **names}, weight_map)
    barrier()
    if dist.get_rank() == 0:
        publish(folder)
    barrier()


def refuse_used(folder: Path) -> None:
    """Raise CheckpointError if the folder exists and is not empty."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CheckpointError(f"'{folder}' exists and is not empty: name another folder, or remove it")


def write_weights(
    folder: Path,
    sizes: Mapping[str, int],
    read: Callable[[str], Tensor],
    *,
    others: Mapping[str, str | bytes],
    shard_bytes: int,
    plain: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Path]:
    """Write tensors to the new `folder` atomically, from a single process, and return the files of tensors.

    sizes: bytes of each tensor, by name.
    read: function from a name to the tensor.
    others: content of the other files, by file name: config.json, recipe.toml and, if the classes have names,
        classes.json.
    shard_bytes: maximum bytes of tensors in a file, unless a single tensor is larger.
    plain: whether to call a single file model.safetensors and write no index for it.
    progress: callback (tensors done, tensors in total).

    Raises CheckpointError for a folder that is not empty and if writing fails.
    """
    shards: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if shards[-1] and filled + size > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    files, done = dict[str, str](), 0
    alone = plain and len(shards) == 1
    with new_folder(folder) as half:
        for number, inside in enumerate(shards, start=1):
            file = SINGLE if alone else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            whole = {}
            for name in inside:
                whole[name] = read(name)
                done += 1
                progress(done, len(sizes))
            _save(whole, half / file)
            files |= dict.fromkeys(whole, file)
        _write_others(half, others, None if alone else files)
    return [folder / file for file in dict.fromkeys(files.values())]


def write_files(folder: Path, contents: Mapping[str, str | bytes]) -> list[Path]:
    """Write files to the new `folder` atomically, and return them. Raises CheckpointError if that fails."""
    with new_folder(folder) as half:
        _write_others(half, contents)
    return [folder / name for name in contents]


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yield the folder in which the context writes `folder`, which appears after the context.

    Raises CheckpointError for a folder that is not empty and if writing fails.
    """
    refuse_used(folder)
    try:
        begin(folder)
        yield partial(folder)
        publish(folder)
    except OSError as error:
        raise CheckpointError(f"'{folder}' cannot be written: {error.strerror or error}") from None
    finally:
        shutil.rmtree(partial(folder), ignore_errors=True)


def _write_others(
    folder: Path, contents: Mapping[str, str | bytes], weight_map: Mapping[str, str] | None = None
) -> None:
    """Write files, and the index of the file of each tensor if there is a `weight_map`."""
    if weight_map is not None:
        contents = {INDEX: json.dumps({"metadata": {}, "weight_map": weight_map}, indent=1), **contents}
    for name, content in contents.items():
        with writing(folder / name):
            (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)


def export(
    checkpoint: Checkpoint,
    folder: Path,
    *,
    shard_bytes: int,
    averages: bool | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Path]:
    """Write only the parameters of a run's checkpoint to `folder`, and return the files of tensors.

    shard_bytes, progress: as in `write_weights`.
    averages: whether to export the running averages of the parameters; None exports them if the checkpoint has any.

    Raises CheckpointError for a folder that is not empty, averages that the checkpoint does not have, and if reading or
    writing fails.
    """
    weights, prefix = open_weights(checkpoint.path, averages), _prefix(checkpoint, averages)
    sizes = {
        name: torch.Size(tensor.shape).numel() * getattr(torch, tensor.dtype).itemsize
        for stored, tensor in checkpoint.index.tensors.items()
        if stored.startswith(prefix) and (name := stored.removeprefix(prefix)) in weights.config.shapes
    }
    try:
        names = [CLASSES] if (checkpoint.path / CLASSES).exists() else []
        texts = {name: read_text(checkpoint.path / name, MAX_JSON_BYTES) for name in names}
        texts[CONFIG] = json.dumps(config_to_json(weights.config), indent=1)
        texts[RECIPE] = read_text(checkpoint.path / RECIPE, MAX_TOML_BYTES)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"'{checkpoint.path}' cannot be read: {error}") from None
    return write_weights(folder, sizes, weights.read, others=texts, shard_bytes=shard_bytes, progress=progress)


@dataclass(frozen=True)
class Weights:
    """Unsharded parameters of saved weights or of a checkpoint, with adapters merged into what they adapt.

    Of a checkpoint with running averages, these are the averages.
    """

    folder: Path
    """Folder of the weights or the checkpoint."""
    config: ModelConfig
    """Configuration of the model."""
    read: Callable[[str], Tensor]
    """Function from the name of a parameter to its tensor."""


def _saved_config(folder: Path) -> ModelConfig:
    """Return the configuration in `folder`, whose adapters are those of a checkpoint. Raises DataError."""
    try:
        return config_from_json(read_object(folder / CONFIG))
    except ModelError as error:
        raise DataError(f"{CONFIG} in '{folder}' cannot be read: {error}") from None


def open_weights(folder: Path, averages: bool | None = None, *, merge: bool = True) -> Weights:
    """Open the weights or the checkpoint in `folder` and check config.json against the shapes of the tensors.

    No tensor is read yet.

    averages: as in `export`, of a checkpoint.
    merge: whether to merge adapters. Else the configuration has them, and they are parameters as any other.

    Raises DataError or CheckpointError if `folder` holds neither, if it is damaged, or if it lacks the averages.
    """
    for name in (CONFIG, RECIPE):
        if not os.path.isfile(folder / name):  # also False for an invalid file name
            raise DataError(
                f"'{folder}' holds no weights ({name} is missing): use a folder such as runs/…/weights or "
                "runs/…/checkpoints/step_450"
            )
    config = _saved_config(folder)
    if (folder / CHECKPOINT_INDEX).exists():
        checkpoint = Checkpoint.open(folder)
        prefix = _prefix(checkpoint, averages)
        if wrong := damage(folder, checkpoint.index.files, only_sizes=True):
            raise CheckpointError(f"the checkpoint '{folder}' is damaged: {wrong}")
        tensors = checkpoint.index.tensors.items()
        shapes = {name.removeprefix(prefix): t.shape for name, t in tensors if name.startswith(prefix)}

        def read(name: str) -> Tensor:
            return read_whole(checkpoint, f"{prefix}{name}")

    else:
        weight_map = read_weight_map(folder, INDEX)
        shards = Shards(folder, dict.fromkeys(weight_map.values()), weight_map)
        shapes, read = shards.shapes, shards.read
    refuse_other_shapes(folder, shapes, parameter_shapes(config, most=len(shapes)), exactly=False)
    if not merge or not isinstance(config, LoRA):
        return Weights(folder, config, read)
    return Weights(folder, config.whole, lambda name: merged_parameter(config, name, read(name), read))


def fingerprint(folder: Path) -> str:
    """Return a checksum of saved weights or of a checkpoint: all of its small files, and both ends of its large ones.

    Parameters in the middle of a large file are not part of it. Raises DataError if the folder cannot be read.
    """
    digest = hashlib.sha256()
    try:
        # The recipe names paths, which may differ between machines.
        for path in sorted(path for path in folder.iterdir() if path.is_file() and path.name != RECIPE):
            with open_regular(path, pages=True) as file:
                size = os.fstat(file.fileno()).st_size
                digest.update(f"{path.name} {size} ".encode(errors="surrogateescape"))
                digest.update(file.read(_ENDS))
                file.seek(max(_ENDS, size - _ENDS))
                digest.update(file.read(_ENDS))
    except OSError as error:
        raise DataError(f"'{folder}' cannot be read: {error.strerror or error}") from None
    return digest.hexdigest()


def parameter_shapes(config: ModelConfig, most: int) -> dict[str, tuple[int, ...]]:
    """Return `ModelConfig.shapes` of a configuration that is not trusted, without allocating any parameter.

    most: number of tensors that exist, which limits the depth.

    Raises DataError for a configuration that no model can have.
    """
    if config.num_blocks > most:
        raise DataError(
            f"the depth of {config.name} is {config.num_blocks:,} but it has only {most:,} tensors: do not use it"
        )
    return config.shapes


@torch.no_grad()
def load_weights(model: ParallelModel, folder: Path, without: Collection[str] = ()) -> None:
    """Load the parameters of `model` from weights or a checkpoint, written under any plan. Collective.

    Of a checkpoint with running averages, these are loaded. The files of a checkpoint are compared with their
    checksums.

    without: names of parameters to leave unchanged.

    Raises DataError or CheckpointError for missing files or parameters, and for other shapes.
    """
    wanted = {name: p for name, p in model.named_parameters() if name not in without}
    checkpoint = Checkpoint.open_whole(folder) if (folder / CHECKPOINT_INDEX).exists() else None
    if checkpoint is not None and not isinstance(_saved_config(folder), LoRA):
        prefix = _prefix(checkpoint)
        owners = {f"{prefix}{copy}": f"{prefix}{owner}" for copy, owner in model.config.shared.items()}
        named = {f"{prefix}{name}": p.detach() for name, p in wanted.items()}
        load_tensors(folder, named, checkpoint.index, owners)
    else:
        weights, owner = open_weights(folder), model.config.owner
        needed = {owner(name): tuple(parameter.shape) for name, parameter in wanted.items()}
        refuse_other_shapes(folder, weights.config.shapes, needed, exactly=False)
        for name, parameter in wanted.items():
            copy_whole_(parameter, weights.read(owner(name)))
    model.parameters_changed()


def _prefix(checkpoint: Checkpoint, averages: bool | None = None) -> str:
    """Return the name prefix of the parameters, or of their running averages.

    averages: which of them; None for those that evaluate best, the averages if there are any.

    Raises CheckpointError if there are no averages.
    """
    averaged = any(name.startswith(AVERAGES) for name in checkpoint.index.tensors)
    if averages and not averaged:
        raise CheckpointError(f"'{checkpoint.path}' has no running averages: use averages=False")
    return AVERAGES if averaged and averages is not False else PARAMETERS
