"""Outputs of a model on one device, for images prepared as in evaluation: logits, features and pictures."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vitpar.data.image_files import NotedImages
from vitpar.errors import ModelError
from vitpar.models import IGNORED
from vitpar.models.config import ModelConfig
from vitpar.parallel import ParallelModel
from vitpar.tasks.image_input import ImageInput
from vitpar.tasks.task import LOSS


@dataclass(frozen=True)
class Outputs:
    """Outputs for some images of a set."""

    samples: list[int]
    """Number of each image in the set; images that cannot be read are left out."""
    logits: Tensor
    """Outputs of the classifier, float32 [samples, classes] on the CPU."""
    features: Tensor
    """Inputs of the classifier, float32 [samples, features] on the CPU; [samples, 0] unless they were wanted."""


def classifiers(config: ModelConfig) -> tuple[str, ...]:
    """Return the modules of the head that compute the classes. Raises ModelError if the model does not say it."""
    if not config.classifiers:
        raise ModelError(
            f"the head of {config.name} names no classifier, so its features are unknown: give its last linear layer "
            'the role "classifier" in TENSOR_PARALLEL'
        )
    return config.classifiers


def feature_width(config: ModelConfig) -> int:
    """Return the number of features that the classifier reads. Raises ModelError as `classifiers` does."""
    first = classifiers(config)[0]
    part = next(part for part in config.last_layer.parts if part.name == first)
    assert part.product is not None, "a classifier is a linear layer"
    return part.product[0]


@contextmanager
def _classifier_inputs(model: ParallelModel) -> Iterator[Callable[[], Tensor]]:
    """Record what the classifiers of `model` read, and yield a function that returns and forgets it.

    A model with several classifiers, such as a distilled DeiT, has the mean of their inputs as features, as in timm's
    `forward_head(pre_logits=True)`.
    """
    names = classifiers(model.config)
    (stage,) = model.stages.values()
    head = stage.layers()[model.config.last_layer.name]
    seen: dict[str, list[Tensor]] = {name: [] for name in names}

    def hook(name: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        return lambda module, arguments: seen[name].append(arguments[0].float())

    handles = [head.get_submodule(name).register_forward_pre_hook(hook(name)) for name in names]

    def taken() -> Tensor:
        features = torch.stack([torch.cat(pieces) for pieces in seen.values()]).mean(dim=0)
        for pieces in seen.values():
            pieces.clear()
        return features

    try:
        yield taken
    finally:
        for handle in handles:
            handle.remove()


def outputs(
    model: ParallelModel,
    source: ImageInput,
    images: NotedImages,
    *,
    features: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Iterator[Outputs]:
    """Yield the outputs for the images of a set, batch by batch, in order.

    model: on one rank.
    features: whether to return the features too.
    progress: callback (images done, images in total).

    Raises ModelError for features of a model that does not say which module is its classifier, and DataError as the
    loader does.
    """
    assert model.plan.world_size == 1, "outputs are computed on one device"
    without = nullcontext(lambda: torch.empty(model.batch_size, 0))
    recording = _classifier_inputs(model) if features else without
    with recording as taken, closing(iter(source.eval_batches(images))) as batches:
        for number, batch in enumerate(batches):
            logits = model.predict(source.images(batch), model.batch_size)
            assert logits is not None
            rows = (batch.labels != IGNORED).nonzero().flatten()
            samples = (number * model.batch_size + rows).tolist()
            yield Outputs(samples, logits.float().cpu()[rows], taken().cpu()[rows])
            progress(min(len(images), (number + 1) * model.batch_size), len(images))


def answers(
    model: ParallelModel,
    source: ImageInput,
    images: NotedImages,
    top: int,
    names: Sequence[str] | None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[dict[str, Any]]:
    """Return a JSON object for each image of a set: its name, and its classes or predictions, or else its error.

    top, names: as for ``Task.answers``. Other arguments and errors are those of `outputs`.
    """
    task, found = source.task, dict[int, list[dict[str, Any]]]()
    for batch in outputs(model, source, images, progress=progress):
        found |= dict(zip(batch.samples, task.answers(batch.logits.double(), top, names), strict=True))
    key = "classes" if task.OUTPUTS_ARE_LABELS else "predictions"
    return [
        {"image": images.name(i), **({key: found[i]} if i in found else {"error": images.problems[i]})}
        for i in range(len(images))
    ]


def pictures(
    model: ParallelModel,
    source: ImageInput,
    images: NotedImages,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Iterator[tuple[float, Mapping[str, Tensor]]]:
    """Yield loss and pictures of the images of a set, in order. The task draws them (``Task.PICTURES``).

    Pictures are by name, the original first, uint8 [3, size, size] on the CPU. Images that cannot be read are left out.
    model, progress: as for `outputs`. Raises DataError as the loader does.
    """
    assert model.plan.world_size == 1, "pictures are drawn on one device"
    task = source.task
    with closing(iter(source.eval_batches(images))) as batches:
        for number, batch in enumerate(batches, start=1):
            taken = source.eval_step(batch)
            assert taken is not None and isinstance(batch.images, Tensor), "the host has decoded all images"
            given, labels = taken
            outputs = model.predict(given.images, model.batch_size, **given.sides)
            assert outputs is not None
            outputs, pixels = outputs.double(), batch.images.to(model.device)
            normalised = source.normalize(pixels, torch.float64)
            drawn = task.pictures(outputs, normalised, torch.zeros_like(labels), model.config)
            shown = {name: source.normalize.pixels(picture).cpu() for name, picture in drawn.items()}
            for row in (labels != IGNORED).nonzero().flatten().tolist():
                loss = task.result(task.sums(outputs[row : row + 1], given.targets[row : row + 1]))[LOSS.name]
                yield loss, {"original": batch.images[row], **{name: one[row] for name, one in shown.items()}}
            progress(min(len(images), number * model.batch_size), len(images))
