"""Reference training in one process.

It has the plain model, one batch, complete tensors, and independent formulas for loss, mixing, clipping, optimizers
(``vitpar.check.updates``) and averages.

Its samples are random and equal on all ranks.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.func import functional_call

from vitpar.check.samples import Drawn, Pixels, Samples
from vitpar.check.updates import Updates
from vitpar.data.transforms.batch import Mixed
from vitpar.models.config import ModelConfig
from vitpar.models.initial import initialise
from vitpar.models.layers import LayeredModel
from vitpar.parallel.attention import by_products
from vitpar.parallel.linear import compute_in_float8
from vitpar.parallel.precision import resolve_precision
from vitpar.recipe import Recipe
from vitpar.tasks import Task
from vitpar.tasks.distill import Distill
from vitpar.weights.folder import Weights

NOISE = {"fp64": 2.0**-53, "fp32": 2.0**-24, "bf16": 2.0**-10, "fp16": 2.0**-13, "fp8": 2.0**-6}
"""Relative changes of parameters and images that make a run round differently, by precision.

Their size hardly matters in 16 bits and fewer, because activations are rounded anyway: in float16 2^-13, 2^-12 and
2^-11 give the same noise.
"""
_NORMALISED = NOISE["fp32"]  # images are normalised and mixed in float32, whatever the precision


FROZEN = "changed elements of frozen parameters"
"""Name of a number in a trace."""


Labels = Tensor | tuple[Tensor, Tensor, Tensor]
"""Labels; or for mixed images the first labels, the second ones, and the weights of the first."""


@dataclass
class Trace:
    """Results of a training, for comparison."""

    numbers: dict[str, float] = field(default_factory=dict)
    """Losses and gradient norms, by name."""
    tensors: dict[str, dict[str, Tensor | None]] = field(default_factory=dict)
    """Tensors by quantity and parameter name. Under a plan they are this rank's shards; None for a missing gradient."""
    parameters: dict[str, Tensor] = field(default_factory=dict)
    """Final parameters that are trained, by name; only in one process."""


class OneProcess:
    """A training in one process.

    recipe: source of optimizer, clipping, average, mixing and precision.
    task: has another formula of the loss.
    scale: factor on the loss before backward.
    noisy: seed of random changes, of the size of rounding, to initial parameters and images; None for no changes.
    teacher: weights of the teacher, whose classes are those of the model; None for none.
    """

    def __init__(
        self,
        recipe: Recipe,
        config: ModelConfig,
        task: Task,
        device: torch.device,
        *,
        scale: float = 1.0,
        noisy: int | None = None,
        teacher: Weights | None = None,
    ) -> None:
        self._task = task
        self._recipe, self._config, self._device, self._scale = recipe, config, device, scale
        self._numbers = resolve_precision(recipe.train.precision)
        self._noise = 0.0 if noisy is None else NOISE[recipe.train.precision]
        self._draws = torch.Generator().manual_seed(noisy or 0)
        self._model: LayeredModel = self._layered(config)
        self._teacher: LayeredModel | None = None
        if teacher is not None:
            self._model.layers()[config.last_layer.name].distilled_training = True
            self._teacher = self._layered(teacher.config).eval()
            for name, parameter in self._teacher.named_parameters():
                parameter.data.copy_(self._noisy(teacher.read(name), self._noise))
        every = {name: p.detach() for name, p in self._model.named_parameters()}
        for p in every.values():
            p.copy_(self._noisy(p, self._noise))
        average = task.teacher_config(config)
        self._averaged: LayeredModel | None = None if average is None else self._layered(average).eval()
        frozen = recipe.frozen(config)
        self._parameters = {name: p for name, p in every.items() if name not in frozen}
        self._has_frozen = bool(frozen)

    def _layered(self, config: ModelConfig) -> LayeredModel:
        """Return a model of all layers, with initial values."""
        train, model = self._recipe.train, LayeredModel(config)
        model.to(device=self._device, dtype=self._numbers.parameters)
        if self._numbers.float8:
            for name, layer in model.layers().items():
                if layer.description.is_block:
                    compute_in_float8(name, layer, train.fp8_min_features, train.fp8_fast_accum)
        initialise(model, train.seed, config)
        model.tie()
        return model

    def run(self, samples: Samples, lr: float) -> Trace:
        """Run all steps: first plain SGD with the learning rate `lr`, then the steps of the recipe."""
        trace, gradients = Trace(), dict[str, Tensor]()
        begin = self._copies()
        self._take_average(begin)
        for step, drawn in enumerate(samples.plain, start=1):
            trace.numbers[f"loss of SGD step {step}"], gradients = self._of(drawn)
            if step == 1:
                trace.tensors["gradient"] = dict(gradients)
            for name, p in self._parameters.items():
                p -= lr * gradients[name]
        trace.tensors["SGD update"] = self._since(begin)

        trace.parameters = self._parameters
        if self._has_frozen:
            trace.numbers[FROZEN] = 0.0
        if not samples.further:
            return trace
        begin, optimizer = self._copies(), Updates(self._recipe.optimizer, self._config)
        average, decay = self._copies(), self._recipe.train.ema_decay
        self._take_average(average)
        for step, given in enumerate(samples.further, start=1):
            if isinstance(given, Pixels):
                images, labels = self._mixed(given.images, given.labels, given.mixed)
                images = self._noisy(images, max(self._noise, _NORMALISED))
                loss, gradients = self._backward(images, labels, given.keys, {})
            else:
                loss, gradients = self._of(given)
            norm = _norm(gradients.values())
            clipped = self._clipped(gradients)
            norms = {f"gradient norm of step {step}": norm, f"clipped norm of step {step}": _norm(clipped.values())}
            trace.numbers |= {f"loss of step {step}": loss, **norms}
            optimizer.step(self._parameters, clipped, self._recipe.lr)
            if decay is not None:
                now = min(decay, 1 - step ** (-2 / 3)) if self._recipe.train.ema_warmup else decay
                average = {name: _averaged(average[name], p, now) for name, p in self._parameters.items()}
                self._take_average(average)
        trace.tensors["update"] = self._since(begin)
        if decay is not None:
            trace.tensors["average"] = {name: value - begin[name] for name, value in average.items()}
        return trace

    def _of(self, drawn: Drawn) -> tuple[float, dict[str, Tensor]]:
        """Return the loss and the gradients for samples as the model takes them."""
        inputs = drawn.inputs
        if inputs.is_floating_point():
            inputs = self._noisy(inputs.to(self._numbers.parameters), self._noise)
        return self._backward(inputs, drawn.labels, drawn.keys, drawn.sides)

    def _backward(
        self, inputs: Tensor, labels: Labels, keys: Tensor, sides: Mapping[str, Tensor]
    ) -> tuple[float, dict[str, Tensor]]:
        """Return the loss and the gradients of trained parameters by name.

        inputs: [batch, channels, size, size] or [batch, tokens].
        labels: int64 [batch, …]; weights of mixed images are float64 [batch].
        keys: int64 [batch], random keys of the samples.
        sides: further inputs of the model by name.
        """
        compute = self._numbers.compute
        taken = inputs.to(self._device, compute if inputs.is_floating_point() else inputs.dtype)
        arguments = (taken, keys.to(self._device) if self._config.stochastic else None)
        beside = {name: side.to(self._device) for name, side in sides.items()}
        outputs = self._outputs(self._model, arguments, beside)
        count: int | Tensor = len(inputs)
        if self._averaged is not None:
            crops = taken[..., : self._averaged.config.input.shape[-1]]
            with torch.no_grad():
                taught = self._outputs(self._averaged, (crops,), beside)
            losses = self._task.reference_taught(outputs, taught, beside)
        elif isinstance(labels, Tensor):
            losses = self._task.reference(outputs, self._targets(inputs, labels, keys))
            count = self._task.count(labels, len(inputs))
        else:
            first, other = (self._task.targets(one.to(self._device)) for one in labels[:2])
            losses = self._task.reference_mixed(outputs, first, other, labels[2].to(outputs))
            count = self._task.count(torch.stack([one.double() for one in labels], 1), len(inputs))
        if self._teacher is not None:
            assert isinstance(self._task, Distill), "a recipe with a teacher has this task"
            with torch.no_grad():
                logits = self._outputs(self._teacher, (taken,))
            losses = losses + self._task.reference_from_teacher(outputs, logits)
        loss = losses.sum() / count
        self._model.zero_grad()
        (loss * self._scale).backward()
        gradients = {}
        for name, p in self._model.named_parameters():
            assert p.grad is not None, f"{name} has no gradient in one process"
            if name in self._parameters:
                gradients[name] = p.grad / self._scale
        return loss.item(), gradients

    def _clipped(self, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return clipped gradients, as torch.nn.utils.clip_grad_norm_ clips those of each part."""
        limit, parts = self._recipe.train.clip_grad_norm, dict[str, dict[str, Tensor]]()
        if not limit:
            return {**gradients}
        for name, g in gradients.items():
            part = self._config.clip_part(name) if self._recipe.train.clip_by_part else ""
            parts.setdefault(part, {})[name] = g
        factors = {part: min(1.0, limit / (_norm(alike.values()) + 1e-6)) for part, alike in parts.items()}
        return {name: factors[part] * g for part, alike in parts.items() for name, g in alike.items()}

    def _outputs(
        self, model: LayeredModel, inputs: tuple[Tensor | None, ...], sides: Mapping[str, Tensor] = {}
    ) -> Tensor:
        """Return the outputs of a model for the batch, computed in the recipe's precision."""
        computed = {name: p.to(self._numbers.compute) for name, p in model.named_parameters()}
        # Not the kernel under test: on GPUs the reference computes attention by matrix products.
        with by_products(self._device):
            outputs: Tensor = functional_call(model, computed, inputs, dict(sides))
        return outputs.to(self._numbers.parameters)

    @torch.no_grad()
    def _take_average(self, average: Mapping[str, Tensor]) -> None:
        """Fill the teacher that is the average of the model, if the task has one."""
        if self._averaged is not None:
            for name, parameter in self._averaged.named_parameters():
                parameter.copy_(average.get(name, self._model.get_parameter(name)))

    def _targets(self, images: Tensor, labels: Tensor, keys: Tensor) -> Tensor:
        if not self._task.LOCAL_TARGETS:
            return self._task.targets(labels.to(self._device))
        wide = images.to(self._device, self._numbers.parameters)
        return self._task.reference_targets(wide, keys.to(self._device), self._config)

    def _mixed(self, pixels: Tensor, labels: Tensor, mixed: Mixed | None) -> tuple[Tensor, Labels]:
        """Return normalised and mixed images, and their labels.

        pixels: uint8 [batch, channels, size, size].
        mixed: partners, weights and boxes; None for no mixing.
        """
        data = self._recipe.data
        mean, std = (torch.tensor(values, dtype=torch.float64)[:, None, None] for values in (data.mean, data.std))
        images = ((pixels.double() / 255 - mean) / std).float()
        if mixed is None:
            return images, labels
        both = []
        for i, (partner, weight, box) in enumerate(zip(mixed.partners, mixed.weights, mixed.boxes, strict=True)):
            if box.any():
                top, left, bottom, right = box
                image = images[i].clone()
                image[:, top:bottom, left:right] = images[partner][:, top:bottom, left:right]
            else:
                image = (weight * images[i].double() + (1 - weight) * images[partner].double()).float()
            both.append(image)
        partners, weights = (torch.from_numpy(array) for array in (mixed.partners, mixed.weights))
        return torch.stack(both), (labels, labels[partners], weights)

    def _noisy(self, x: Tensor, noise: float) -> Tensor:
        if not self._noise:
            return x
        signs = torch.randint(0, 2, x.shape, generator=self._draws) * 2 - 1
        return x * (1 + noise * signs.to(x))

    def _copies(self) -> dict[str, Tensor]:
        return {name: p.clone() for name, p in self._parameters.items()}

    def _since(self, begin: dict[str, Tensor]) -> dict[str, Tensor | None]:
        return {name: p - begin[name] for name, p in self._parameters.items()}


def _norm(tensors: Iterable[Tensor]) -> float:
    return math.sqrt(sum(x.double().square().sum().item() for x in tensors))


def _averaged(average: Tensor, p: Tensor, decay: float) -> Tensor:
    return (decay * average.double() + (1 - decay) * p.double()).to(p.dtype)
