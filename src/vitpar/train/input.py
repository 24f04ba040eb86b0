"""From packed images to what a step takes: this rank's batches, its normalised images and its labels, as the recipe
says."""

from pathlib import Path

import torch.distributed as dist
from torch import Tensor

from vitpar.data import (
    Batch,
    EvalBatch,
    EvalLoader,
    EvalTransform,
    Normalize,
    ShardSet,
    Skipped,
    TrainLoader,
    TrainTransform,
)
from vitpar.parallel import ParallelModel
from vitpar.train.recipe import Recipe


def open_data(recipe: Recipe) -> tuple[ShardSet, ShardSet]:
    """The training and validation sets of a recipe. Raises DataError."""
    path = Path(recipe.data.path)
    return ShardSet.open(path, "train"), ShardSet.open(path, "val")


def transforms(recipe: Recipe, size: int) -> tuple[TrainTransform, EvalTransform, Normalize]:
    """How images of `size` pixels are prepared. Raises RecipeError for a setting out of its range."""
    d = recipe.data
    train = TrainTransform(size, d.crop_scale, d.crop_ratio, d.flip, d.interpolation)
    return train, EvalTransform(size, d.crop_pct, d.interpolation), Normalize(d.mean, d.std)


class Input:
    """Input of one rank of `model`.

    Only ranks that hold the stem decode images, each its own rows; all read the batch's labels from the index.
    """

    def __init__(self, recipe: Recipe, model: ParallelModel) -> None:
        self._recipe, self._model = recipe, model
        self._train, self._eval, self._normalize = transforms(recipe, model.config.image_size)

    def train_batches(self, shards: ShardSet) -> TrainLoader:
        """Every global batch, with this rank's images, without end."""
        return TrainLoader(shards, self._train, seed=self._recipe.train.seed, **self._slice())

    def eval_batches(self, shards: ShardSet) -> EvalLoader:
        """The whole set in batches of the training shape, with this rank's images; the tail is padded with IGNORED
        labels."""
        return EvalLoader(shards, self._eval, **self._slice())

    def skipped(self, loader: TrainLoader | EvalLoader) -> Skipped:
        """What all ranks skipped together. Collective, if the recipe skips bad samples at all."""
        if self._recipe.data.bad_sample == "fail":
            return Skipped()
        mine = loader.skipped if self._model.first_of_images else Skipped()
        everyone = [Skipped()] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
        return sum(everyone, Skipped())

    def _slice(self) -> dict:
        size = self._model.batch_size
        return {
            "batch_size": size,
            "rows": self._model.image_rows(size) if self._model.takes_images else (),
            "workers": self._recipe.data.workers,
            "bad_sample": self._recipe.data.bad_sample,
        }

    def images(self, batch: Batch | EvalBatch) -> Tensor | None:
        """This rank's images, normalised, on the device in the compute precision, [rows, 3, size, size], or None where
        there are none."""
        if batch.images is None:
            return None
        return self._normalize(self.to_device(batch.images), self._model.precision.compute)

    def labels(self, batch: Batch | EvalBatch) -> Tensor:
        """Labels of the whole batch on the device, int64 [batch], IGNORED where there is no usable image.

        Which images are unusable is known where they are decoded; all ranks are told.
        """
        labels = self.to_device(batch.labels)
        if self._recipe.data.bad_sample == "skip" and dist.get_world_size() > 1:
            dist.all_reduce(labels, dist.ReduceOp.MIN)  # IGNORED is less than any label
        return labels

    def to_device(self, tensor: Tensor) -> Tensor:
        """`tensor` on the device, without waiting for a GPU to finish its work."""
        if self._model.device.type != "cuda":
            return tensor
        return tensor.pin_memory().to(self._model.device, non_blocking=True)
