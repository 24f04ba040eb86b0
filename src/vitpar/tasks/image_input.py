"""Input of a rank: from packed or streamed images to the device tensors of a step, as the recipe says."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from vitpar.data.device_decoding import DeviceDecoder
from vitpar.data.image_files import NotedImages
from vitpar.data.loader import Batch, EvalLoader, KeptImages, Loader, LoaderSettings, Skipped, TrainLoader
from vitpar.data.shards.shard_set import ShardSet
from vitpar.data.stream.loader import StreamLoader
from vitpar.data.stream.stream_set import ImageSet, StreamPart, StreamSet
from vitpar.data.transforms.drawn import DrawnBatch
from vitpar.data.transforms.sample import TrainTransform
from vitpar.errors import DataError, ModelError
from vitpar.launch.world_group import all_gather_json, all_reduce_
from vitpar.models import IGNORED
from vitpar.models.config import ModelConfig
from vitpar.parallel import ParallelModel
from vitpar.recipe import Recipe
from vitpar.strategy.stages import images_are_at_outputs, takes_all_of
from vitpar.tasks.data import are_small, decoding_threads, mixing, order_of, transforms
from vitpar.tasks.image_cache import hold_images, make_cache
from vitpar.tasks.input import Input
from vitpar.tasks.task import StepInput, Task
from vitpar.text import count

CHANNELS = 3
"""Channels that images are decoded to."""


def local_targets(task: Task, config: ModelConfig, images: Tensor, labels: Tensor, keys: Tensor) -> Tensor:
    """Return the targets of samples under ``Task.LOCAL_TARGETS``, NaN for samples that could not be read.

    images: normalised, float32 or float64 [samples, channels, size, size].
    labels: IGNORED for a sample that could not be read.
    """
    targets = task.local_targets(images, keys, config)
    return targets.masked_fill((labels == IGNORED).view(-1, *(1,) * (targets.ndim - 1)), float("nan"))


class ImageInput(Input):
    """Input of images for one rank of `model`.

    Only ranks that hold embed decode images; those that take the same images share the work. All ranks read the
    labels of packed data from the index. Labels of a stream are known where its images are decoded, and sent to all.

    Where the task makes targets of images (``Task.LOCAL_TARGETS``), ranks that give outputs decode the images of these
    too; so do ranks whose teacher takes other images in training than the model. Unless all ranks take these images
    anyway, no work is shared then.

    teacher: model that also takes the images of a training; None for none.
    normalize: normalisation of images.

    Raises ModelError for a model of images that are not decoded: with another number of channels than 3.
    """

    def __init__(self, recipe: Recipe, model: ParallelModel, task: Task, teacher: ParallelModel | None = None) -> None:
        if model.config.channels != CHANNELS:
            raise ModelError(
                f"{model.config.name} takes images of {count(model.config.channels, 'channel')}, but images are "
                f"decoded to {CHANNELS}, grey ones too: give the model {CHANNELS} channels"
            )
        super().__init__(recipe, model, task)
        self.workers = self._threads()
        self._kept: dict[tuple[object, str], KeptImages] = {}
        """Images in memory by data set and use, `train` or `eval`."""
        train, self._eval, normalize = transforms(recipe, model.config.image_size)
        self._train: TrainTransform | list[TrainTransform] = train
        self.normalize = replace(normalize, compiled=model.execution.compile)
        self._mix = mixing(recipe)
        self._decoder: DeviceDecoder | None = None
        self._rows = model.image_rows(model.batch_size) if model.takes_images else []
        self._outputs = model.output_rows(model.batch_size) if task.IMAGE_TARGETS and model.gives_outputs else []
        self._teacher = teacher
        taught = [] if teacher is None else teacher.image_rows(model.batch_size)
        apart = task.IMAGE_TARGETS and not images_are_at_outputs(model.config, model.plan)
        if teacher is not None:
            plans = model.plan, teacher.plan, model.config, teacher.config
            apart = not takes_all_of(*plans, model.batch_size)
        self._eval_rows = sorted({*self._rows, *self._outputs})
        """Rows of an evaluation batch whose images this rank needs."""
        self._decoded = sorted({*self._eval_rows, *taught})
        """Rows of a training batch whose images this rank needs."""
        self._taken = self._places(self._rows) if apart else None
        self._targeted = self._places(self._outputs) if apart else None
        self._taught = self._places(taught) if taught != self._decoded else None
        self._output_rows = torch.tensor(self._outputs, dtype=torch.int64, device=model.device)
        self._peers: dist.ProcessGroup | None = None
        for ranks in [] if apart else model.image_groups:
            group = dist.new_group(ranks) if len(ranks) > 1 else None
            self._peers = group if dist.get_rank() in ranks else self._peers

    def _places(self, rows: Sequence[int]) -> Tensor:
        """Return the index of each of `rows` in `_decoded`, on the device."""
        places = {row: place for place, row in enumerate(self._decoded)}
        return torch.tensor([places[row] for row in rows], dtype=torch.int64, device=self._model.device)

    def _threads(self) -> int:
        return decoding_threads(self._recipe, self._model.device.type, self.local.cores, small=self.small_samples)

    def cache(self, train: ImageSet, val: ImageSet | None = None) -> str | None:
        self.small_samples = are_small(train)
        self.workers = self._threads()
        device = self._model.device
        if self._recipe.data.decode == "device":  # not in an evaluation, which needs no torchcodec
            self._decoder = DeviceDecoder(device)
            return f"JPEGs are decoded by {self._decoder.words}"
        packed = [images for images in (train, val) if isinstance(images, ShardSet)]
        if self._recipe.data.cache == "none" or not packed:
            return None
        decodes = bool(self.train_rows or self._share(self._decoded))
        if self._recipe.data.cache == "memory":
            cache, message = make_cache(self._recipe, self.local, packed)
            for number, images in enumerate(packed if decodes else ()):
                self._kept[images, "train"] = self._kept[images, "eval"] = {"cache": cache.part(number)}
            return message
        threads, last = max(1, self.workers), packed[1] if len(packed) > 1 else None
        held, message = hold_images(packed[0], last, self._eval, self.local, device, threads, decodes)
        for images, use, stored in zip(packed, ("train", "eval"), held or (), strict=False):
            self._kept[images, use] = {"stored": stored}
        return message

    def train_batches(self, images: ImageSet, start: int = 0, sizes: Callable[[int], int] | None = None) -> Loader:
        """Return a loader of this rank's share of the images.

        Raises DataError for a stream with fewer shards than ranks that decode.
        """
        streamed = isinstance(images, StreamSet)
        settings = self._settings(images, "train", self._decoded if streamed else self._needed())
        settings |= {"sizes": sizes, "decoder": self._decoder}
        if isinstance(images, StreamSet):
            part, parts = self._part()
            if len(images.shards) < parts:
                raise DataError(
                    f"'{images.place}' has {count(len(images.shards), 'shard')} for the {parts} ranks that decode "
                    "images, and each needs its own: write more and smaller shards, or decode on fewer ranks with pp"
                )
            assert not isinstance(self._train, list), "tasks of several crops refuse streams"
            return StreamLoader(images, self._train, seed=self._recipe.train.seed, part=part, start=start, **settings)
        return TrainLoader(images, self._train, order=order_of(self._recipe, len(images)), start=start, **settings)

    @property
    def train_rows(self) -> list[int]:
        """Rows of a training batch that this rank decodes itself."""
        return self._share(self._needed())

    def eval_batches(self, images: ImageSet | NotedImages) -> Loader:
        """Return a loader of this rank's share of the images.

        Batches of a stream continue until `eval_step` says that all ranks have reached the end.
        """
        settings = self._settings(images, "eval", self._eval_rows)
        if isinstance(images, StreamSet):
            return StreamLoader(images, self._eval, part=self._part()[0], **settings)
        return EvalLoader(images, self._eval, **settings)

    def _settings(self, images: object, use: str, rows: Sequence[int]) -> LoaderSettings:
        """Return the settings of a loader for this rank's share of `rows`. use: `train` or `eval`."""
        settings: LoaderSettings = {
            "batch_size": self._model.batch_size,
            "rows": self._share(rows),
            "workers": self.workers,
            "bad_sample": self._recipe.data.bad_sample,
            "device": self._model.device,
        }
        return {**settings, **self._kept.get((images, use), {})}

    def synthetic(self) -> StepInput:
        c, size, device = self._model.config, self._model.batch_size, self._model.device

        def noise(rows: list[int]) -> Tensor:
            return torch.randn(len(rows), c.channels, c.image_size, c.image_size, device=device)

        images, taught, compute = None, None, self._model.precision.compute
        if self._decoded and not self.task.IMAGE_TARGETS:
            images, taught = self._shared(noise(self._decoded).to(compute))
        elif self._model.takes_images:
            images = noise(self._rows).to(compute)
        numbers = torch.arange(size, device=device)
        labels = numbers % self.task.labels.count
        if not self.task.IMAGE_TARGETS:
            return StepInput(images, self.task.counted_targets(labels), numbers, taught=taught)
        return StepInput(images, self._local_targets(noise(self._outputs), labels, numbers), numbers)

    def skipped(self, loader: Loader) -> Skipped:
        if self._recipe.data.bad_sample == "fail":
            return Skipped()
        mine = loader.skipped
        everyone = all_gather_json([mine.times, list(mine.problems), mine.shards])
        return sum((Skipped(times, tuple(problems), shards) for times, problems, shards in everyone), Skipped())

    def train_step(self, batch: Batch) -> StepInput:
        labels, keys = self._labels_and_keys(batch)
        if self.task.IMAGE_TARGETS:
            return StepInput(*self._images_and_targets(batch, labels, keys), keys)
        mixed = self._mix(batch.keys.numpy(), batch.size) if self._mix else None
        targets = self.task.counted_targets(labels) if mixed is None else mixed.labels(labels, IGNORED)
        if not self._decoded:
            return StepInput(None, targets, keys)
        needed, compute = self._needed(), self._model.precision.compute
        images = self._gathered(batch.images, batch.size, len(needed))
        if mixed is None:
            images = self.normalize(images, compute)
        else:
            images = mixed.images(self.normalize(images), needed, len(self._decoded)).to(compute)
        taken, taught = self._shared(images)
        return StepInput(taken, targets, keys, taught=taught)

    def _shared(self, images: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Return the images of the model and of the teacher among those of `_decoded`; None where one takes none."""
        taken = images if self._taken is None else images[self._taken]
        taught = images if self._taught is None else images[self._taught]
        return taken if self._model.takes_images else None, None if self._teacher is None else taught

    def eval_step(self, batch: Batch) -> tuple[StepInput, Tensor] | None:
        if batch.whole:
            labels = self.labels(batch)
        else:
            has_more = torch.tensor([0 if batch.ended else 1])
            combined = self._together(self.to_device(torch.cat([batch.labels, has_more])))
            if not combined[-1].item():
                return None
            labels = combined[:-1]
        if self.task.IMAGE_TARGETS:
            return StepInput(*self._images_and_targets(batch, labels, torch.zeros_like(labels))), labels
        return StepInput(self.images(batch), self.task.counted_targets(labels)), labels

    def _images_and_targets(self, batch: Batch, labels: Tensor, keys: Tensor) -> tuple[Tensor | None, Tensor]:
        """Return this rank's images, None where the model takes none, and the targets of its outputs."""
        pixels = self._gathered(batch.images, batch.size, len(self._eval_rows))
        images = None
        if self._model.takes_images:
            taken = pixels if self._taken is None else pixels[self._taken]
            images = self.normalize(taken, self._model.precision.compute)
        # Not in the 16 bits of computation.
        targeted = self.normalize(pixels if self._targeted is None else pixels[self._targeted])
        return images, self._local_targets(targeted, labels, keys)

    def _local_targets(self, images: Tensor, labels: Tensor, keys: Tensor) -> Tensor:
        """Return the targets of this rank's outputs. labels, keys: of the complete batch."""
        here, wide = self._output_rows, images.to(self._model.precision.parameters)
        if not len(here):
            return wide.new_zeros(0)
        return local_targets(self.task, self._model.config, wide, labels[here], keys[here])

    def images(self, batch: Batch) -> Tensor | None:
        """Return this rank's images, [rows, 3, size, size], normalised, on the device in the compute precision.

        None on ranks without images.
        """
        if not self._model.takes_images:
            return None
        pixels = self._gathered(batch.images, batch.size, len(self._eval_rows))
        taken = self._taken if self.task.IMAGE_TARGETS else None
        return self.normalize(pixels if taken is None else pixels[taken], self._model.precision.compute)

    def labels(self, batch: Batch) -> Tensor:
        """Return the labels of the global batch on the device, int64 [batch], IGNORED where there is no usable image.

        The ranks that decode find unusable images, and send this to all. Collective for streams, and if the recipe
        skips bad samples.
        """
        labels = self.to_device(batch.labels)
        if not batch.whole:
            return self._together(labels)
        if self._recipe.data.bad_sample == "skip":
            all_reduce_(labels, dist.ReduceOp.MIN)  # IGNORED is less than any label
        return labels

    def _labels_and_keys(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the labels and keys of the global batch, on the device."""
        if batch.whole:
            return self.labels(batch), self.to_device(batch.keys)
        labels, keys = self._together(self.to_device(torch.stack([batch.labels, batch.keys])))
        return labels, keys

    def _together(self, numbers: Tensor) -> Tensor:
        """Return the numbers of the rank that has each row, on all ranks. Collective.

        Other ranks have smaller numbers there: IGNORED or 0.
        """
        all_reduce_(numbers, dist.ReduceOp.MAX)
        return numbers

    def _needed(self) -> list[int]:
        """Return the rows of a training batch that this rank and its peers decode: their own, and those mixed in."""
        return self._mix.needed(self._decoded, self._model.batch_size) if self._mix else self._decoded

    def _part(self) -> tuple[StreamPart | None, int]:
        """Return the part of a stream that this rank reads, and the number of ranks that decode.

        The part is None if this rank does not decode.
        """
        assert self._taken is None, "`refuse_streamed_targets` has refused it"
        groups, rank = self._model.image_groups, dist.get_rank()
        group_rows = self._model.batch_size // len(groups)  # rows of a group
        share = -(-group_rows // len(groups[0]))
        # Ranks of a group that decode. Shares are rounded up, so the last ranks of a large group may get no rows.
        decoding = -(-group_rows // share)
        assert not self._rows or len(self._rows) == group_rows, "groups take equally many rows"
        readers = [reader for group in groups for reader in group[:decoding]]
        return (StreamPart(readers.index(rank), len(readers)) if rank in readers else None), len(readers)

    def _share(self, rows: Sequence[int]) -> list[int]:
        """Return the part of `rows` that this rank decodes. Its peers, which take the same rows, decode the others."""
        if self._peers is None:
            return list(rows)
        share = -(-len(rows) // dist.get_world_size(self._peers))
        begin = share * dist.get_rank(self._peers)
        return list(rows[begin : begin + share])

    def _gathered(self, images: Tensor | DrawnBatch | None, size: int, number: int) -> Tensor:
        """Return all `number` images of `size` pixels, on the device. images: this rank's share of them."""
        if isinstance(images, DrawnBatch):
            mine = images.made(self.to_device)
        else:
            mine = self.to_device(torch.empty(0, 3, size, size, dtype=torch.uint8) if images is None else images)
        if self._peers is None:
            return mine
        peers = dist.get_world_size(self._peers)
        share = -(-number // peers)
        if len(mine) < share:
            mine = torch.cat([mine, mine.new_zeros(share - len(mine), *mine.shape[1:])])
        whole = mine.new_empty(peers * share, *mine.shape[1:])
        dist.all_gather(list(whole.chunk(peers)), mine, group=self._peers)
        return whole[:number]
