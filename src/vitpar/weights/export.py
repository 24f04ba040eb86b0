"""From a run's checkpoint to weights for use: the parameters alone, in the layout of ``vitpar.weights.folder``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from vitpar.checkpoint import Checkpoint
from vitpar.checkpoint.names import AVERAGES, CONFIG, PARAMETERS, RECIPE
from vitpar.checkpoint.whole import read_whole
from vitpar.errors import CheckpointError
from vitpar.files import read_text
from vitpar.limits import MAX_JSON_BYTES, MAX_TOML_BYTES
from vitpar.weights.folder import write_weights


def export(
    checkpoint: Checkpoint,
    folder: Path,
    *,
    shard_bytes: int,
    averages: bool | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Path]:
    """Write the parameters of `checkpoint` to `folder`, as `write_weights` does. Returns the files of tensors.

    averages: whether to take the running averages (None: where there are any). Raises CheckpointError for a folder that
    is not empty, averages that were not kept, and what cannot be read or written.
    """
    tensors = checkpoint.index.tensors
    if averages is None:
        averages = any(name.startswith(AVERAGES) for name in tensors)
    prefix = AVERAGES if averages else PARAMETERS
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
