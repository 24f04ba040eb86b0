"""JPEGs that the device of a model decodes and crops (`data.decode = "device"`), by torchcodec.

Decoding threads only read the files. The thread that reads the last one of a batch lets the device decode all of it, on
a stream of its own, while the device trains on earlier batches. Pixels differ in the last bits from those of the host.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from threading import Lock

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from vitpar.data.batches import View
from vitpar.data.images import GPU_DECODED_BYTES, EncodedImage
from vitpar.data.transforms.drawn import DrawnBatch, draw_crops
from vitpar.data.transforms.sample import TrainTransform
from vitpar.errors import RecipeError


class DeviceDecoder:
    """Decoder of JPEGs on a device, for the loaders of a rank.

    device: that trains: a GPU, or a CPU for tests.

    Raises RecipeError if torchcodec is missing, or does not fit the installed torch.
    """

    def __init__(self, device: torch.device) -> None:
        try:
            from torchcodec.decoders import decode_jpeg
        except (ImportError, AttributeError, OSError, RuntimeError) as error:
            why = next(iter(str(error).splitlines()), "")
            raise RecipeError(
                f"data.decode 'device' needs torchcodec 0.16 or newer, which cannot be imported ({why}): pip install "
                "'vitpar[device-decode]', or set data.decode to host"
            ) from error
        self._decode, self._device, self._alone = decode_jpeg, device, Lock()
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.words = f"torchcodec {version('torchcodec')} on {device}: pixels differ from the host's in the last bits"

    def crops(
        self, encoded: Mapping[int, EncodedImage], views: Sequence[View]
    ) -> tuple[list[list[tuple[list[int], Tensor]]], list[int]]:
        """Decode JPEGs, and crop them for each view.

        encoded: JPEGs `for_gpu`, by their rows of the batch.

        Returns for each view rows and their crops on the device, uint8 [rows, 3, size, size], and the rows of JPEGs
        that could not be decoded, with those that were to be decoded at the same time.
        """
        made, failed = [list[tuple[list[int], Tensor]]() for _ in views], list[int]()
        with self._alone, torch.cuda.stream(self._stream):
            for rows in _groups(encoded):
                data = [torch.frombuffer(bytearray(encoded[row].data), dtype=torch.uint8) for row in rows]
                heights, widths = np.array([encoded[row].shape for row in rows]).T
                try:
                    images = self._decode(data, mode="RGB", device=self._device)
                except (RuntimeError, ValueError):
                    failed += rows
                    continue
                for view, parts in zip(views, made, strict=True):
                    assert isinstance(view.transform, TrainTransform)
                    drawn = draw_crops(view.transform, view.draws.of(np.array(rows)), heights, widths)
                    parts.append((rows, _crops(view.transform, images, drawn)))
        return made, failed

    def joined(self, images: Tensor, parts: Sequence[tuple[list[int], Tensor]]) -> Tensor:
        """Return images of the host together with rows that the device has made, on the device, when they are there."""
        with torch.cuda.stream(self._stream):
            whole = images.to(self._device, non_blocking=True)
            for rows, crops in parts:
                whole.index_copy_(0, _sent(rows, self._device), crops)
        if self._stream:
            self._stream.synchronize()
        return whole

    def hand_over(self, *images: Tensor | DrawnBatch | None) -> None:
        """Keep the memory of images of `joined` until the calling thread's stream has used them."""
        for one in images:
            tensor = one.images if isinstance(one, DrawnBatch) else one
            if tensor is not None and tensor.is_cuda:
                tensor.record_stream(torch.cuda.current_stream(self._device))


def _groups(encoded: Mapping[int, EncodedImage]) -> Iterator[list[int]]:
    """Yield rows that are decoded at once."""
    rows, decoded = list[int](), 0
    for row, image in sorted(encoded.items()):
        size = 3 * image.width * image.height
        decoded += size
        if rows and decoded > GPU_DECODED_BYTES:
            yield rows
            rows, decoded = [], size
        rows.append(row)
    yield rows


def _crops(transform: TrainTransform, images: Sequence[Tensor], drawn: NDArray[np.int64]) -> Tensor:
    """Return crops of images of any size on their device, resized and flipped, uint8 [images, 3, size, size].

    drawn: as `draw_crops` returns them.
    """
    size = transform.size
    parts = [
        F.interpolate(
            image[None, :, top : top + height, left : left + width].float(),
            (size, size),
            mode=transform.interpolation,
            antialias=True,
        )
        for image, (top, left, height, width) in zip(images, drawn[:4].T.tolist(), strict=True)
    ]
    crops = torch.cat(parts).round_().clamp_(0, 255).to(torch.uint8)
    flipped = _sent(np.flatnonzero(drawn[4]).tolist(), crops.device)
    return crops.index_copy_(0, flipped, crops.index_select(0, flipped).flip(3))


def _sent(rows: list[int], device: torch.device) -> Tensor:
    return torch.tensor(rows, dtype=torch.int64).to(device, non_blocking=True)
