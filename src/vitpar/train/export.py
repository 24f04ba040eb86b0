"""From a run's checkpoint to weights for use: the parameters alone, in the layout of ``vitpar.train.weights``."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file

from vitpar.checkpoint import Checkpoint
from vitpar.checkpoint.atomic import partial
from vitpar.checkpoint.whole import read_whole
from vitpar.errors import CheckpointError
from vitpar.train.training_state import AVERAGES, CONFIG, PARAMETERS, RECIPE
from vitpar.train.weights import INDEX


def export(
    checkpoint: Checkpoint,
    folder: Path,
    *,
    shard_bytes: int,
    averages: bool | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Path]:
    """Write the parameters of `checkpoint` to `folder`, whole or not at all, in files of `shard_bytes` at most, or of
    one tensor. Returns the files of tensors.

    averages: whether to take the running averages (None: where there are any). progress: told how many tensors of how
    many are done. Raises CheckpointError for a folder that is not empty, averages that were not kept, and what cannot
    be read or written.
    """
    tensors = checkpoint.index.tensors
    if averages is None:
        averages = any(name.startswith(AVERAGES) for name in tensors)
    prefix = AVERAGES if averages else PARAMETERS
    names = [name for name in tensors if name.startswith(prefix)]
    if not names:
        raise CheckpointError(f"'{checkpoint.path}' has no running averages: export the parameters themselves")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CheckpointError(f"'{folder}' exists and is not empty: name another folder, or remove it")
    shards: list[list[str]] = [[]]
    filled = 0
    for name in names:
        size = torch.Size(tensors[name].shape).numel() * getattr(torch, tensors[name].dtype).itemsize
        if shards[-1] and filled + size > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    half, files, done = partial(folder), dict[str, str](), 0
    try:
        shutil.rmtree(half, ignore_errors=True)
        half.mkdir(parents=True)
        for number, inside in enumerate(shards, start=1):
            file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            whole = {}
            for name in inside:
                whole[name.removeprefix(prefix)] = read_whole(checkpoint, name)
                done += 1
                progress(done, len(names))
            save_file(whole, half / file)
            files |= dict.fromkeys(whole, file)
        (half / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": files}, indent=1))
        for name in (CONFIG, RECIPE):
            shutil.copyfile(checkpoint.path / name, half / name)
        if folder.exists():
            folder.rmdir()
        os.replace(half, folder)
    except OSError as error:
        raise CheckpointError(f"'{folder}' cannot be written: {error.strerror or error}") from None
    return [folder / file for file in dict.fromkeys(files.values())]
