"""One layer as the first rank of a plan runs it, in a world whose other ranks are pretended.

What would be sent is prepared and unpacked but not sent. So one device is enough for the shapes of any strategy, and
each new one of the runtime can be measured.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.testing._internal.distributed.fake_pg import FakeStore

from vitpar.models.config import ViTConfig
from vitpar.parallel import ParallelModel, parallelize
from vitpar.parallel.attention import Attention, choose_attention
from vitpar.parallel.precision import precision
from vitpar.planner.measure.live_bytes import live_bytes
from vitpar.planner.profile.model import CHECKPOINTS, LayerKind, always_wrapped, tensors
from vitpar.strategy import parse, token_layout, validate
from vitpar.strategy.layout import image_layout, row_parts

NAMES: dict[LayerKind, str] = {"stem": "stem", "block": "blocks.0", "head": "head"}
CHOSEN_FOR = 64
"""Images of the micro-batch for which the kernel of attention is chosen."""


@dataclass(frozen=True)
class Subject:
    """What is profiled: `config` in `precision`, for stages of up to `ranks` ranks. attention: as in recipes."""

    config: ViTConfig
    precision: str
    ranks: int
    compile_blocks: bool = False
    attention: str = "auto"

    def strategies(self) -> Iterator[tuple[str, str, bool]]:
        """(tensor, checkpoint, wrapped) of all that is measured."""
        for tensor in tensors(self.config, self.ranks):
            kinds = (True,) if always_wrapped(tensor) else (False, True)
            for checkpoint in CHECKPOINTS:
                if not (checkpoint == "selective" and self.compile_blocks):
                    yield from ((tensor, checkpoint, wrapped) for wrapped in kinds)

    def choose_attention(self, device: torch.device) -> Attention:
        """Its kernel from here on, as a run on one rank with `CHOSEN_FOR` images chooses it. Raises RecipeError."""
        plan = validate(parse("dp1"), self.config, CHOSEN_FOR)
        with pretended(1):
            return choose_attention(self.attention, self.config, plan, CHOSEN_FOR, precision(self.precision), device)


@contextmanager
def pretended(ranks: int) -> Iterator[None]:
    """A process group of `ranks` in which we are the first and the others are nobody."""
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    torch.set_flush_denormal(True)  # what is received is whatever was there: tiny numbers would take long
    try:
        yield
    finally:
        torch.set_flush_denormal(False)
        dist.destroy_process_group()


@contextmanager
def built(subject: Subject, mesh: str, device: torch.device, depth: int = 1) -> Iterator[ParallelModel]:
    """The first rank's part of the model, with `depth` blocks, under a strategy that needs no pipeline."""
    config = replace(subject.config, depth=depth)
    smallest = row_parts(parse(mesh).strategy)
    plan = validate(parse(mesh), config, smallest)
    with pretended(plan.world_size):
        yield parallelize(
            config,
            plan,
            batch_size=smallest,
            device=device,
            precision_name=subject.precision,
            compile_blocks=subject.compile_blocks,
        )


class LayerBench:
    """One layer to run forward and backward on any number of rows. If it is wrapped, gathered parameters are
    kept and gradients wait, unless `syncing`."""

    def __init__(self, model: ParallelModel, kind: LayerKind) -> None:
        (stage,) = model.stages.values()
        self.layer, self.kind, self._model = stage.layers()[NAMES[kind]], kind, model
        self._strategy = model.plan.strategy
        self.groups = self._strategy.degree("fsdp")
        self.unit = token_layout(self._strategy)[0].rows // self.groups
        self._pending: list[tuple[Tensor, Tensor | None]] = []
        self.syncing(False)
        stage.train()

    def syncing(self, sync: bool) -> None:
        """Whether parameters are dropped and gradients reduced in backward, as in a step's last one."""
        if isinstance(self.layer, FSDPModule):
            self.layer.set_reshard_after_forward(False)
            self.layer.set_reshard_after_backward(sync)
            self.layer.set_requires_gradient_sync(sync)

    def prepare(self, rows: int) -> None:
        """Make the input of a micro-batch with `rows` rows of a tensor group."""
        config, total = self._model.config, rows * self.groups
        numbers = {"device": self._model.device, "dtype": self._model.precision.compute}
        if self.kind == "stem":
            here = len(image_layout(self._strategy)[0].row_range(total))
            self._x = torch.randn(here, config.channels, config.image_size, config.image_size, **numbers)
        else:
            part = token_layout(self._strategy)[0]
            features = len(part.feature_range(config.width))
            here = len(part.row_range(total))
            self._x = torch.randn(here, config.tokens, features, **numbers)
        self._keys = torch.zeros(here, dtype=torch.int64, device=self._model.device) if config.stochastic else None
        self._labels = torch.zeros(total, dtype=torch.int64, device=self._model.device)
        self._gradient: Tensor | None = None

    def forward(self) -> None:
        """Once more; `backward` must follow for each."""
        x = self._x.detach().requires_grad_(self.kind != "stem")
        if self.kind == "head":
            y = self._model.loss(self.layer(x), self._labels)
        else:
            y = self.layer(x, self._keys)
            if self._gradient is None:
                self._gradient = torch.randn_like(y)
        self._pending.append((x, y))

    def backward(self) -> None:
        """Of the last forward."""
        _, y = self._pending.pop()
        torch.autograd.backward(y, None if self.kind == "head" else self._gradient)

    def backward_to_input(self) -> None:
        """Of the last forward, without the gradients of parameters."""
        x, y = self._pending.pop()
        torch.autograd.grad(y, x, None if self.kind == "head" else self._gradient)

    def memory(self, rows: int) -> tuple[int, int]:
        """Bytes that forward leaves, and more than that at most in forward or backward."""
        self.prepare(rows)
        self.forward()
        self.backward()  # from here on gradients are there
        with live_bytes(self._model.device) as live:
            self.forward()
            saved, most = live.now, live.most
            live.restart()
            self.backward()
        return saved, max(most, live.most) - saved
