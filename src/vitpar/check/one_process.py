"""The same training by one process: the plain model, one batch, whole tensors, and formulas instead of vitpar's loss,
mixing, clipping, optimizers and averages."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from vitpar.check.samples import Samples
from vitpar.check.updates import Updates
from vitpar.data import Mixed
from vitpar.models.config import ViTConfig
from vitpar.models.initial import initialise
from vitpar.models.vit import ViT
from vitpar.parallel.float8 import compute_in_float8
from vitpar.parallel.precision import precision
from vitpar.training.recipe import Recipe

NOISE = {"fp64": 2.0**-53, "fp32": 2.0**-24, "bf16": 2.0**-10, "fp16": 2.0**-13, "fp8": 2.0**-6}
"""Relative changes of parameters and images that make a run round differently. In 16 bits and fewer their size hardly
matters: in float16 2^-13, 2^-12 and 2^-11 give the same noise, since activations are rounded anyway."""
_NORMALISED = NOISE["fp32"]  # images are normalised and mixed in float32, whatever the precision


@dataclass
class Trace:
    """What a training leaves to be compared.

    numbers: losses and norms of gradients, by name. tensors: by quantity and parameter name; under a plan this rank's
    shards, and None for a gradient that is missing. parameters: those at the end, in one process.
    """

    numbers: dict[str, float] = field(default_factory=dict)
    tensors: dict[str, dict[str, Tensor | None]] = field(default_factory=dict)
    parameters: dict[str, Tensor] = field(default_factory=dict)


class OneProcess:
    """A training by one process.

    recipe: its optimizer, clipping, average, smoothing, mixing and precision. scale: what the loss is multiplied by
    before backward. noisy: None, or the seed of random changes to initial parameters and images, of the size of
    rounding.
    """

    def __init__(
        self, recipe: Recipe, config: ViTConfig, device: torch.device, *, scale: float = 1.0, noisy: int | None = None
    ) -> None:
        self._recipe, self._config, self._device, self._scale = recipe, config, device, scale
        self._numbers = precision(recipe.train.precision)
        self._noise = 0.0 if noisy is None else NOISE[recipe.train.precision]
        self._draws = torch.Generator().manual_seed(noisy or 0)
        self._model = ViT(config).to(device=device, dtype=self._numbers.parameters)
        if self._numbers.float8:
            for block in self._model.blocks.values():
                compute_in_float8(block)
        initialise(self._model, recipe.train.seed, config)
        self._parameters = {name: p.detach() for name, p in self._model.named_parameters()}
        for p in self._parameters.values():
            p.copy_(self._noisy(p, self._noise))

    def run(self, samples: Samples, lr: float) -> Trace:
        """Take all steps: first plain ones by SGD with the learning rate `lr`, then those of the recipe."""
        trace, gradients = Trace(), dict[str, Tensor]()
        begin = self._copies()
        for step, (images, labels, keys) in enumerate(samples.plain, start=1):
            target = F.one_hot(labels, self._config.num_classes).double()
            images = self._noisy(images.to(self._numbers.parameters), self._noise)
            trace.numbers[f"loss of SGD step {step}"], gradients = self._backward(images, target, keys)
            if step == 1:
                trace.tensors["gradient"] = dict(gradients)
            for name, p in self._parameters.items():
                p -= lr * gradients[name]
        trace.tensors["SGD update"] = self._since(begin)

        trace.parameters = self._parameters
        if not samples.pixels:
            return trace
        begin, optimizer = self._copies(), Updates(self._recipe.optimizer, self._config.heads)
        average, decay = self._copies(), self._recipe.train.ema_decay
        for step, (pixels, labels, keys) in enumerate(samples.pixels, start=1):
            images, target = self._mixed(pixels, labels, samples.mixed[step - 1])
            loss, gradients = self._backward(self._noisy(images, max(self._noise, _NORMALISED)), target, keys)
            norm = math.sqrt(sum(g.double().square().sum().item() for g in gradients.values()))
            trace.numbers |= {f"loss of step {step}": loss, f"gradient norm of step {step}": norm}
            limit = self._recipe.train.clip_grad_norm
            factor = min(1.0, limit / (norm + 1e-6)) if limit else 1.0  # as torch.nn.utils.clip_grad_norm_
            clipped = {name: factor * g for name, g in gradients.items()}
            optimizer.step(self._parameters, clipped, self._recipe.optimizer.lr)
            if decay is not None:
                now = min(decay, 1 - step ** (-2 / 3)) if self._recipe.train.ema_warmup else decay
                average = {name: _averaged(average[name], p, now) for name, p in self._parameters.items()}
        trace.tensors["update"] = self._since(begin)
        if decay is not None:
            trace.tensors["average"] = {name: value - begin[name] for name, value in average.items()}
        return trace

    def _backward(self, images: Tensor, target: Tensor, keys: Tensor) -> tuple[float, dict[str, Tensor]]:
        """The loss and every gradient. images: [batch, channels, size, size]. target: float64 [batch, classes], of each
        class its share of a sample's label. keys: int64 [batch]."""
        compute = self._numbers.compute
        inputs = (images.to(self._device, compute), keys.to(self._device) if self._config.stochastic else None)
        computed = {name: p.to(compute) for name, p in self._model.named_parameters()}
        with sdpa_kernel(SDPBackend.MATH) if self._device.type == "cuda" else nullcontext():  # not what is checked
            logits = functional_call(self._model, computed, inputs).to(self._numbers.parameters)
        smoothing, classes = self._recipe.train.label_smoothing, self._config.num_classes
        smooth = (1 - smoothing) * target.to(self._device) + smoothing / classes
        loss = -(smooth.to(logits.dtype) * logits.log_softmax(1)).sum(1).mean()
        self._model.zero_grad()
        (loss * self._scale).backward()
        gradients = {}
        for name, p in self._model.named_parameters():
            assert p.grad is not None, f"{name} has no gradient in one process"
            gradients[name] = p.grad / self._scale
        return loss.item(), gradients

    def _mixed(self, pixels: Tensor, labels: Tensor, mixed: Mixed | None) -> tuple[Tensor, Tensor]:
        """Normalised images, mixed two by two, and the share of each class in their labels.

        pixels: uint8 [batch, channels, size, size]. mixed: partners, weights and boxes, None where nothing is mixed.
        """
        data = self._recipe.data
        mean, std = (torch.tensor(values, dtype=torch.float64)[:, None, None] for values in (data.mean, data.std))
        images = ((pixels.double() / 255 - mean) / std).float()
        target = F.one_hot(labels, self._config.num_classes).double()
        if mixed is None:
            return images, target
        both, shares = [], []
        for i, (partner, weight, box) in enumerate(zip(mixed.partners, mixed.weights, mixed.boxes, strict=True)):
            shares.append(weight * target[i] + (1 - weight) * target[partner])
            if box.any():
                top, left, bottom, right = box
                image = images[i].clone()
                image[:, top:bottom, left:right] = images[partner][:, top:bottom, left:right]
            else:
                image = (weight * images[i].double() + (1 - weight) * images[partner].double()).float()
            both.append(image)
        return torch.stack(both), torch.stack(shares)

    def _noisy(self, x: Tensor, noise: float) -> Tensor:
        if not self._noise:
            return x
        signs = torch.randint(0, 2, x.shape, generator=self._draws) * 2 - 1
        return x * (1 + noise * signs.to(x))

    def _copies(self) -> dict[str, Tensor]:
        return {name: p.clone() for name, p in self._parameters.items()}

    def _since(self, begin: dict[str, Tensor]) -> dict[str, Tensor | None]:
        return {name: p - begin[name] for name, p in self._parameters.items()}


def _averaged(average: Tensor, p: Tensor, decay: float) -> Tensor:
    return (decay * average.double() + (1 - decay) * p.double()).to(p.dtype)
