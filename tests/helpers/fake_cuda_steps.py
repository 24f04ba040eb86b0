"""Run training steps on a simulated CUDA device (`helpers.fake_cuda`), all cases in one separate process."""

import ctypes
import json
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from helpers.fake_cuda import DEVICE, FakeCuda
from helpers.written_weights import weights_of
from vitpar import model_config, parse, validate
from vitpar.data.loader import Batch
from vitpar.data.randomness import Draws
from vitpar.data.transforms.drawn import DrawnBatch
from vitpar.models.initial import initialise
from vitpar.models.layers import LayeredModel
from vitpar.recipe import Recipe
from vitpar.tasks.data import transforms
from vitpar.tasks.image_input import ImageInput
from vitpar.training.build import build

BATCH, CLASSES, HELD = 8, 10, 300
TEACHER: dict[str, Any] = {
    **{"image_size": 16, "patch_size": 4, "embed_dim": 32, "depth": 1, "num_heads": 2, "num_classes": CLASSES}
}
COMMON: dict[str, Any] = {
    "data.path": "none",
    "model.name": "vit_custom",
    "model.image_size": 16,
    "model.patch_size": 4,
    "model.embed_dim": 64,
    "model.depth": 2,
    "model.num_heads": 4,
    "train.batch_size": BATCH,
    "train.precision": "bf16",
    "train.compile": False,
    "train.ema_decay": 0.99,
}


class Fault(NamedTuple):
    """Mistake in a step, planted by a forward hook of a block."""

    hook: Callable[[nn.Module, Any, Tensor], Tensor]
    """Forward hook of a block that makes the mistake."""

    error: str
    """Words that the error message must contain."""


def _in_backward(y: Tensor, hook: Callable[[Tensor], Tensor]) -> Tensor:
    y.register_hook(hook)
    return y


FAULTS = {
    "tensor of the host": Fault(lambda block, x, y: y + torch.ones(y.shape[-1]), "devices"),
    "number of the host": Fault(lambda block, x, y: y + torch.stack([y[0, 0, 0], torch.ones(())]).sum(), "one device"),
    "value read": Fault(lambda block, x, y: y * y.float().mean().item(), "reading a value"),
    "value read in backward": Fault(
        lambda block, x, y: _in_backward(y, lambda g: g * g.max().item()), "reading a value"
    ),
    "shape that depends on values": Fault(lambda block, x, y: y + y[y > 0].sum(), "aten.nonzero"),
    "blocking copy": Fault(
        lambda block, x, y: y * torch.tensor([2.0], dtype=y.dtype, device=y.device), "aten._to_copy"
    ),
    "device synchronised": Fault(lambda block, x, y: (torch.cuda.synchronize(), y)[1], "torch.cuda.synchronize"),
}


@dataclass(frozen=True)
class Case:
    """Two training steps on the simulated device."""

    mesh: str
    """Strategy string."""

    settings: dict[str, Any] = field(default_factory=dict)
    """Recipe keys that replace those of `COMMON`."""

    rank: int = 0
    """Rank to simulate."""

    waits: float = 0
    """How often the host may wait for the device in the second step."""

    fault: str | None = None
    """Name in `FAULTS` of a mistake to plant, or None."""

    def __str__(self) -> str:
        words = [f"{name.partition('.')[2]}={value}" for name, value in self.settings.items()]
        words += [f"rank={self.rank}"] if self.rank else []
        words += [self.fault] if self.fault else []
        return " ".join([self.mesh, *words])


def run_cases(library: ctypes.CDLL, cases: Iterable[Case]) -> None:
    """Print a JSON object that maps each case's name to its traceback, or to null if it passed."""
    torch.set_num_threads(1)
    device = FakeCuda(library)
    found: dict[str, str | None] = {}
    with TemporaryDirectory() as folder:
        config = model_config("vit_custom", **TEACHER)
        model = LayeredModel(config)
        initialise(model, 0, config)
        weights_of(model, config, Path(folder) / "teacher")
        _run_cases(cases, device, found, Path(folder) / "teacher")
    print(json.dumps(found))


def _run_cases(cases: Iterable[Case], device: FakeCuda, found: dict[str, str | None], teacher: Path) -> None:
    """Run the cases and add what they raise to `found`. teacher: weights for cases of distillation."""
    for case in cases:
        dist.init_process_group("fake", rank=case.rank, world_size=parse(case.mesh).world_size, store=FakeStore())
        try:
            with device:
                _two_steps(case, device, teacher)
            found[str(case)] = None
        except Exception:
            found[str(case)] = traceback.format_exc()
        finally:
            dist.destroy_process_group()


def _two_steps(case: Case, device: FakeCuda, teacher: Path) -> None:
    """Run two steps, from a batch on the host to the moving average of the parameters.

    In the first step the host may wait: optimizer states are created, input constants are copied, pipeline stages
    connect.
    """
    taught = {"distill.teacher": str(teacher)} if "distill.plan" in case.settings else {}
    recipe = _recipe({**case.settings, **taught})
    config = recipe.config(CLASSES)
    trained = build(recipe, config, validate(parse(case.mesh), config, BATCH), DEVICE)
    step, model, given = trained.step(), trained.model, trained.input()
    assert isinstance(given, ImageInput)
    if case.fault is not None:
        (stage,) = model.stages.values()
        stage.blocks["0"].register_forward_hook(FAULTS[case.fault].hook)
    shape = 3, config.image_size, config.image_size
    images = torch.zeros(BATCH, *shape, dtype=torch.uint8)
    decoded: Tensor | DrawnBatch | None = images[: len(model.image_rows(BATCH))] if model.takes_images else None
    if taught:
        decoded = images[: len(given.train_rows)]
    if recipe.data.cache == "device":
        stored = torch.zeros(HELD, *shape, dtype=torch.uint8, device=DEVICE)
        rows = np.arange(len(given.train_rows))
        transform, draws = transforms(recipe, config.image_size)[0], Draws(rows)
        work = transform.stored(rows, draws, *shape[1:]) + transform.work(draws)
        decoded = DrawnBatch(stored, work, transform)
    labels, keys = torch.arange(BATCH) % CLASSES, torch.arange(BATCH)
    batch = Batch(decoded, labels, keys, epoch=0.0, samples=BATCH, size=config.image_size)
    step(1, 1e-3, *given.train_step(batch))
    with device.host_waits_at_most(case.waits):
        stepped = step(2, 1e-3, *given.train_step(batch))
    assert stepped.loss.device == stepped.norm.device == DEVICE


def _recipe(settings: dict[str, Any]) -> Recipe:
    sections: dict[str, dict[str, Any]] = {}
    for name, value in {**COMMON, **settings}.items():
        section, _, key = name.partition(".")
        sections.setdefault(section, {})[key] = value
    return Recipe(**sections)
