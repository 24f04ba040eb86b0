"""Images held in the memory of the devices as the recipe says, decoded by all ranks together."""

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from vitpar.data.cache import Shape
from vitpar.data.held import SharedPixels, decode_into
from vitpar.data.shards.shard_set import ShardSet
from vitpar.data.transforms.sample import EvalTransform
from vitpar.errors import DataError
from vitpar.launch.local_ranks import LocalRanks, available_memory
from vitpar.launch.world_group import all_gather_json
from vitpar.tasks.image_cache import SHARE, refuse_any, shared
from vitpar.tasks.image_data import held_shapes
from vitpar.text import size

_INSTEAD = "set data.cache to memory or none"


def hold_images(
    train: ShardSet,
    val: ShardSet | None,
    evaluation: EvalTransform,
    local: LocalRanks,
    device: torch.device,
    workers: int,
    decodes: bool,
) -> tuple[list[Tensor] | None, str]:
    """Return the images of both sets on `device`, and a message about them, which is the same on all ranks. Collective.

    The images are uint8 [images, 3, height, width]: of `train` as decoded, of `val` as `evaluation` makes them, with
    one black image more, which stands for padding.

    workers: decoding threads of this rank.
    decodes: whether this rank takes images. Others get None.

    Raises DataError, on all ranks, for images that cannot be read, or of several sizes, and if there is no memory.
    """

    def make() -> tuple[SharedPixels, list[Shape]]:
        shapes = held_shapes(train, val, evaluation.size)
        _refuse_large(shapes, available_memory(), local.size // len(local.ranks), "of memory are available")
        return SharedPixels(shapes), shapes

    memory, shapes = shared(local, decodes, make, lambda path, shapes: SharedPixels(shapes, path), _INSTEAD)
    decoding = all_gather_json(decodes)
    error, held = None, None
    if memory is not None:
        peers = [rank for rank in local.ranks if decoding[rank]]
        part = slice(peers.index(dist.get_rank()), None, len(peers))
        try:
            if device.type == "cuda":
                _refuse_large(shapes, torch.cuda.mem_get_info(device)[0], 1, "of the GPU's memory are free")
            decode_into(memory.images[0], train, range(len(train))[part], None, workers)
            if val is not None:
                decode_into(memory.images[1], val, range(len(val))[part], evaluation, workers)
        except DataError as refused:
            error = str(refused)
    refuse_any(all_gather_json(error))  # all images are decoded then
    if memory is not None:
        held = [images.to(device) for images in memory.images]
    where = "the memory of each GPU" if device.type == "cuda" else "one memory of a machine's ranks"
    return held, f"images are held in {where}, {size(_bytes(shapes))}, and augmented there in batches"


def _bytes(shapes: Sequence[Shape]) -> int:
    return sum(map(math.prod, shapes))


def _refuse_large(shapes: Sequence[Shape], available: int | None, sharing: int, words: str) -> None:
    """Raise DataError if the images take more than `SHARE` of the available memory.

    sharing: equal memories that take of it.
    """
    if available is not None and sharing * _bytes(shapes) > SHARE * available:
        raise DataError(
            f"data.cache 'device' holds all images, {size(_bytes(shapes))} decoded, but {size(available)} {words}, of "
            f"which training needs a part: {_INSTEAD}, or pack smaller images"
        )
