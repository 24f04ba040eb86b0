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
from vitpar.strategy import data_index
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

    Only ranks that hold the stem decode images; the others read labels from the index.
    """

    def __init__(self, recipe: Recipe, model: ParallelModel) -> None:
        self._recipe, self._model = recipe, model
        self._train, self._eval, self._normalize = transforms(recipe, model.config.image_size)

    def train_batches(self, shards: ShardSet) -> TrainLoader:
        """This rank's slice of every global batch, without end."""
        return TrainLoader(shards, self._train, seed=self._recipe.train.seed, **self._slice())

    def eval_batches(self, shards: ShardSet) -> EvalLoader:
        """This rank's part of the whole set, in batches of the training shape; the tail is padded with IGNORED
        labels."""
        return EvalLoader(shards, self._eval, **self._slice())

    def skipped(self, loader: TrainLoader | EvalLoader) -> Skipped:
        """What all ranks skipped together. Collective, if the recipe skips bad samples at all."""
        if self._recipe.data.bad_sample == "fail":
            return Skipped()
        mine = loader.skipped if self._model.mesh["tp"].get_local_rank() == 0 else Skipped()  # along tp all read alike
        everyone = [Skipped()] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
        return sum(everyone, Skipped())

    def _slice(self) -> dict:
        plan = self._model.plan
        return {
            "batch_size": self._model.batch_size,
            "data_index": data_index(plan, dist.get_rank()),
            "data_parallel": plan.strategy.data_parallel,
            "workers": self._recipe.data.workers,
            "pixels": self._model.takes_images,
            "bad_sample": self._recipe.data.bad_sample,
        }

    def images(self, batch: Batch | EvalBatch) -> Tensor | None:
        """Normalised images on the device in the compute precision, [local, 3, size, size], or None where there are
        none."""
        if batch.images is None:
            return None
        return self._normalize(self.to_device(batch.images), self._model.precision.compute)

    def labels(self, batch: Batch | EvalBatch) -> Tensor:
        """Labels on the device, int64 [local], IGNORED where there is no usable image.

        Which images are unusable is known where they are decoded; the other pipeline ranks are told.
        """
        labels = self.to_device(batch.labels)
        pipe = self._model.mesh["pp"]
        if self._recipe.data.bad_sample == "skip" and pipe.size() > 1:
            dist.broadcast(labels, group=pipe.get_group(), group_src=0)
        return labels

    def to_device(self, tensor: Tensor) -> Tensor:
        """`tensor` on the device, without waiting for a GPU to finish its work."""
        if self._model.device.type != "cuda":
            return tensor
        return tensor.pin_memory().to(self._model.device, non_blocking=True)
