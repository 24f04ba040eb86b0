"""Train a small ViT on CIFAR-10 for a fixed time with vitpar's step and its augmentation of images on the device.

    python experiments/gpu_cifar.py --data PATH/TO/cifar10 --seconds 120 --json cifar.json
    python experiments/gpu_cifar.py --data PATH/TO/cifar10 --tiny --device cpu         # a rehearsal

The model is about a ViT-Lite-7/4 (arXiv 2104.05704): 7 blocks, 256 features, MLP of 2, 3.7 M parameters. --data is
anything that ``vitpar data pack`` reads; without a split val, a fifth of the images is held out. The program takes
--seconds with loading, compiling and evaluation. Accuracy on `val` is of the parameters and of their running average,
every tenth of the time. The JSON file is written at each of them.
"""

from __future__ import annotations

import argparse
import itertools
import math
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bench import settings
from bench.device_images import Split, load
from bench.harness import Report, parser
from bench.one_gpu import settle
from vitpar.data.randomness import Draws, SampleOrder, sample_keys
from vitpar.data.transforms.batch import Mix, Normalize
from vitpar.data.transforms.drawn import DrawnBatch
from vitpar.data.transforms.policies import parse_policy
from vitpar.data.transforms.sample import TrainTransform
from vitpar.errors import DataError
from vitpar.launch import ALONE, join, leave
from vitpar.models import IGNORED, ViTConfig, model_config
from vitpar.parallel import Execution, ParallelModel, parallelize
from vitpar.parallel.attention import choose_attention
from vitpar.parallel.precision import resolve_precision
from vitpar.strategy import parse, validate
from vitpar.training.optim.average import EMA
from vitpar.training.optim.one_pass import choose_implementation
from vitpar.training.optim.optimizer import ShardedOptimizer
from vitpar.training.step import Stepped, TrainStep

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
MIXED = 0.8
"""Share of the pairs of images that are mixed."""
AUGMENTATION = TrainTransform(
    32, padding=4, policy=parse_policy("rand-m9-mstd0.5-inc1"), erase=0.25, mean=MEAN, std=STD
)
PREFETCH = 2
"""Batches whose random choices are drawn ahead."""
LAST_LR = 1e-5
WARM_UP = 0.05
"""Share of the time in which the learning rate rises."""
RESERVE_S = 3.0
"""Seconds kept for the end of the process."""
EVALUATIONS = 10
"""Evaluations of a training."""
MODEL = {"image_size": 32, "patch_size": 4, "embed_dim": 256, "depth": 7, "num_heads": 4, "mlp_hidden_dim": 512}
TINY = {"embed_dim": 64, "depth": 2, "mlp_hidden_dim": 128}


class Training:
    """Model, optimizer and data of the experiment."""

    def __init__(self, options: argparse.Namespace, device: torch.device) -> None:
        self.options, self.device = options, device
        self.splits = load(options.data, device, 320 if options.tiny else None)
        sizes = MODEL | (TINY if options.tiny else {})
        config = model_config("vit_custom", num_classes=10, pool="avg", drop_path=0.1, init="timm", **sizes)
        assert isinstance(config, ViTConfig)
        self.model, self.attention = self._model(config)
        self.config = config
        optimizer = SimpleNamespace(**{**vars(settings.OPTIMIZER), "lr": options.lr, "weight_decay": options.decay})
        chosen = choose_implementation(optimizer, self.model.execution.precision, device)
        sharded = ShardedOptimizer(self.model.named_parameters(), optimizer, implementation=chosen.name)
        self.average = EMA(self.model, 0.999, warmup=True)
        self.step = TrainStep(self.model, sharded, clip_grad_norm=1.0, ema=self.average)
        self.normalize = Normalize(MEAN, STD, compiled=self.model.execution.compile)

    def _model(self, config: ViTConfig) -> tuple[ParallelModel, str | None]:
        options, device = self.options, self.device
        precision = "bf16" if device.type == "cuda" else "fp32"
        plan = validate(parse("dp1"), config, options.batch_size)
        kernel = choose_attention("auto", config, plan, options.batch_size, resolve_precision(precision), device)
        execution = Execution(options.batch_size, precision, seed=settings.SEED)
        execution = replace(execution, compile=device.type == "cuda")
        return parallelize(config, plan, execution, device), kernel.backend

    @property
    def steps_an_epoch(self) -> int:
        """Complete batches of the training images."""
        return len(self.splits["train"].labels) // self.options.batch_size

    def batches(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield images, labels and keys of one step after the other, without end.

        A thread draws the random choices of the next batches.
        """
        train, size = self.splits["train"], self.options.batch_size
        order = SampleOrder(settings.SEED, len(train.labels))
        sides, mix = train.images.shape[2:], Mix(0.8, 1.0, MIXED)

        def drawn(start: int) -> tuple[DrawnBatch, NDArray[np.int64], NDArray[np.int64]]:
            epochs, samples, repeats = order.batch(start, size)
            keys = sample_keys(order.seed, epochs, samples, repeats)
            draws = Draws(keys)
            work = AUGMENTATION.stored(samples, draws, *sides) + AUGMENTATION.work(draws)
            return DrawnBatch(train.images, work, AUGMENTATION), samples, keys

        with ThreadPoolExecutor(1) as pool:
            waiting = deque(pool.submit(drawn, place * size) for place in range(PREFETCH))
            for place in itertools.count(PREFETCH):
                waiting.append(pool.submit(drawn, place * size))
                batch, samples, keys = waiting.popleft().result()
                images = self.normalize(batch.made(self._sent))
                mixed = mix(keys, images.shape[-1])
                labels = mixed.labels(train.labels[self._sent(torch.from_numpy(samples))], IGNORED)
                yield mixed.images(images, range(size), size), labels, self._sent(torch.from_numpy(keys))

    def _sent(self, tensor: Tensor) -> Tensor:
        return tensor.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else tensor

    def accuracies(self) -> dict[str, float]:
        """Return the top-1 accuracy on `val` of the parameters and of their average."""
        found = {"top1": self._accuracy(self.splits["val"])}
        with self.average.averaged():
            return found | {"top1_average": self._accuracy(self.splits["val"])}

    def _accuracy(self, split: Split) -> float:
        size = min(1000, len(split.labels))
        right = torch.zeros((), device=self.device)
        batches = len(split.labels) // size
        for images, labels in zip(split.images.split(size)[:batches], split.labels.split(size), strict=False):
            logits = self.model.predict(self.normalize(images), size)
            assert logits is not None, "one rank has all stages"
            right.add_((logits.argmax(1) == labels).sum())
        return right.item() / (batches * size)


def main() -> None:
    """Read the options, train and print a line for every tenth of the steps."""
    begun = time.perf_counter()
    made = parser(__doc__)
    made.add_argument("--data", type=Path, required=True, metavar="SOURCE", help="CIFAR-10")
    made.add_argument("--seconds", type=float, default=120, metavar="N", help="of the complete program (120)")
    made.add_argument("--batch-size", type=int, default=512, metavar="N", help="images a step (512)")
    made.add_argument("--lr", type=float, default=1e-3, metavar="RATE", help="highest learning rate (1e-3)")
    made.add_argument("--decay", type=float, default=0.06, metavar="RATE", help="weight decay (0.06)")
    made.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    made.add_argument("--tiny", action="store_true", help="a tiny model, few images: only to see the program run")
    options = made.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        made.error("no CUDA device can be seen: run on a machine with a GPU, or rehearse with --tiny --device cpu")
    if options.tiny:
        options.batch_size = 64
    try:
        training = Training(options, join(ALONE, options.device))
    except DataError as error:
        made.error(str(error))
    train(training, begun)
    leave()


def train(training: Training, begun: float) -> None:
    """Train until `--seconds` after `begun`. The learning rate follows the time, so that the schedule ends with it."""
    options = training.options
    untimed, warm = (1, 2) if options.tiny else (20, 60)
    report, rows = Report(options.json), list[dict[str, Any]]()
    report.found |= {"loaded_seconds": time.perf_counter() - begun, "attention": training.attention}
    feed, number = training.batches(), 0

    def step(lr: float) -> Stepped:
        nonlocal number
        number += 1
        return training.step(number, lr, *next(feed))

    def timed(times: int) -> float:
        settle(training.device)
        since = time.perf_counter()
        for _ in range(times):
            step(options.lr * number / 2000)
        settle(training.device)
        return (time.perf_counter() - since) / times

    timed(untimed)
    seconds = timed(warm - untimed)
    training.accuracies()  # compiles
    start = time.perf_counter()
    training.accuracies()
    evaluation = time.perf_counter() - start
    # at least a moment: without time left, the training is one step and its evaluation
    length = max(begun + options.seconds - RESERVE_S - evaluation - start, 1e-3)
    report.found |= {"step_seconds": seconds, "images_per_second": options.batch_size / seconds}
    report.found |= {"batch_size": options.batch_size, "gflops": training.config.flops / 1e9}
    print(f"{options.batch_size / seconds:,.0f} images/s; training begins after {start - begun:.1f} s", flush=True)
    progress, evaluated = 0.0, 0
    while progress < 1:
        done = step(rate(options.lr, progress))
        progress = (time.perf_counter() - start) / length
        if progress >= 1 or progress * EVALUATIONS >= evaluated + 1:
            evaluated += 1
            row = {"step": number, "epoch": number / training.steps_an_epoch, "loss": done.loss.item()}
            rows.append(row | training.accuracies() | {"seconds": time.perf_counter() - begun})
            print(rows[-1], flush=True)
            report.keep("rows", rows)


def rate(most: float, progress: float) -> float:
    """Return the learning rate at a share of the time: linear warm-up of a twentieth, then a cosine to LAST_LR."""
    if progress <= WARM_UP:
        return most * progress / WARM_UP
    return LAST_LR + (most - LAST_LR) * (1 + math.cos(math.pi * (progress - WARM_UP) / (1 - WARM_UP))) / 2


if __name__ == "__main__":
    main()
