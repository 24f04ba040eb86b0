"""A step must not wait for the device, break a block's graph, recompile, or run per-layer operations after backward."""

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from helpers.ranks import Ranks
from vitpar import Execution, ParallelModel, model_config, parallelize, parse, validate
from vitpar.models.config import ModelConfig
from vitpar.models.loss import CrossEntropy
from vitpar.recipe.sections.training import OptimizerSection
from vitpar.training.optim.average import EMA
from vitpar.training.optim.optimizer import ShardedOptimizer
from vitpar.training.step import TrainStep

CPU = torch.device("cpu")
BATCH = 8
WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "unique", "_unique2", "allclose")
"""Operations whose result the host needs before it can continue."""
READS = ("item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__")
"""Methods of a tensor that read its values on the host."""


class Waiting(AssertionError):
    """Error: the host waited for the device."""


class Operations(TorchDispatchMode):
    """Counter of dispatched operations, by phase of the step."""

    def __init__(self) -> None:
        super().__init__()
        self.phase, self.counts = "", Counter[str]()
        self.waits: list[str] = []
        self.on_dtensors: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[self.phase] += 1
        if any(issubclass(kind, DTensor) for kind in types):
            self.on_dtensors.add(str(func))
        if func.overloadpacket.__name__ in WAITS:
            self.waits.append(f"{func} in '{self.phase}'")
        return func(*args, **(kwargs or {}))

    @contextlib.contextmanager
    def in_phase(self, name: str) -> Iterator[None]:
        before, self.phase = self.phase, name
        yield
        self.phase = before


@contextlib.contextmanager
def nothing_is_read() -> Iterator[None]:
    """Raise `Waiting` if a tensor's values are read on the host inside the ``with`` block."""

    def refuse(name: str) -> Callable[..., Any]:
        def refused(*_: object) -> Any:
            raise Waiting(f"Tensor.{name} waits for the device")

        return refused

    with contextlib.ExitStack() as stack:
        for name in READS:
            stack.enter_context(mock.patch.object(Tensor, name, refuse(name)))
        yield


SWIN = model_config(
    "swin_custom",
    image_size=16,
    patch_size=1,  # grids of 16, 8, 4 and 2 tokens: windows are shifted in the first three stages
    window_size=2,
    embed_dim=8,
    depths=(2, 2, 6, 2),
    num_heads=(2, 2, 2, 2),
    num_classes=10,
    drop_path=0.1,
)


def built(
    device: torch.device,
    mesh: str,
    depth: int = 4,
    compiled: bool = False,
    config: ModelConfig | None = None,
    **options: Any,
) -> ParallelModel:
    config = config or model_config(
        "vit_nano_patch4_16", num_classes=10, depth=depth, drop_path=0.1, dropout=0.1, layer_scale=0.1, **options
    )
    plan = validate(parse(mesh), config, BATCH)
    return parallelize(config, plan, Execution(BATCH, compile=compiled), device, CrossEntropy(0.1))


def update(model: ParallelModel, optimizer: str = "adamw") -> Callable[[], object]:
    """Return a step that uses every feature: mixed labels, clipping, an optimizer and a moving average."""
    images = torch.randn(len(model.image_rows(BATCH)), 3, 16, 16) if model.takes_images else None
    mixed = torch.tensor([[1.0, 2.0, 0.3]] * BATCH, dtype=torch.float64)
    settings = OptimizerSection(name=optimizer, momentum=0.9 if optimizer in ("sgd", "lars", "muon") else 0)
    parameters = ShardedOptimizer(model.named_parameters(), settings, matrices=model.config.hidden_matrices)
    step = TrainStep(model, parameters, clip_grad_norm=1.0, ema=EMA(model, 0.9))
    return lambda: step(2, 1e-3, images, mixed, torch.arange(BATCH))


def operations(device: torch.device, mesh: str, depth: int = 4, optimizer: str = "adamw") -> Operations:
    """Return the operations of the second step, after the first has set up."""
    model = built(device, mesh, depth)
    step = update(model, optimizer)
    step()
    with Operations() as found:
        model.phase = found.in_phase
        step()
    return found


def waits(device: torch.device, mesh: str, optimizer: str = "adamw") -> list[str]:
    model = built(device, mesh)
    step = update(model, optimizer)
    step()
    with nothing_is_read(), Operations() as found:
        model.phase = found.in_phase
        step()
    return found.waits


MESHES = ["dp1", "dp1+ckpt", "dp2", "fsdp2", "dp2+zero1", "tp2", "tp2+sp", "dp2+ckpt.selective"]


@pytest.mark.parametrize("mesh", MESHES)
def test_no_step_waits_for_the_device(mesh: str, ranks: Ranks) -> None:
    for found in ranks(parse(mesh).world_size).run(waits, mesh):
        assert not found


# The other optimizers keep their step count on the host and read it there.
@pytest.mark.parametrize("optimizer", ["sgd", "lion", "lars"])
def test_no_optimizer_waits_for_the_device(optimizer: str, alone: None) -> None:
    assert not waits(CPU, "dp1", optimizer)


def test_host_waits_are_detected() -> None:
    with Operations() as found:
        assert torch.ones(1).sum() > 0
    assert found.waits
    with nothing_is_read(), pytest.raises(Waiting, match=r"Tensor.item waits"):
        torch.ones(1).item()


@pytest.mark.parametrize("mesh", ["dp1", "fsdp2", "tp2"])
def test_operation_count_after_backward_does_not_depend_on_depth(mesh: str, ranks: Ranks) -> None:
    """Norm, clipping and update must use foreach kernels; an operation per layer costs host time in every step."""
    pool = ranks(parse(mesh).world_size)
    shallow, deep = ([found.counts for found in pool.run(operations, mesh, depth)] for depth in (2, 6))
    for few, many in zip(shallow, deep, strict=True):
        assert many["forward"] > few["forward"] > 0
        assert {phase: many[phase] - few[phase] for phase in ("norm and clipping", "update")} == {
            "norm and clipping": 0,
            "update": 0,
        }


@pytest.mark.parametrize("mesh", ["fsdp2", "dp2+zero1", "tp2", "tp2+sp"])
def test_no_operation_runs_on_dtensors(mesh: str, ranks: Ranks) -> None:
    """DTensor dispatch costs the host more time than a small layer computes.

    Autograd's detach of gradients is the exception.
    """
    for found in ranks(2).run(operations, mesh):
        assert found.on_dtensors <= {"aten.detach.default"}


def graphs(device: torch.device, mesh: str, config: ModelConfig | None = None) -> tuple[list[int], dict[str, int]]:
    """Return the number of graphs after each of three steps and two evaluations, and the graph breaks.

    A block that the compiler would run eagerly raises an error.
    """
    torch.compiler.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    found = []
    with mock.patch.object(torch, "compile", functools.partial(torch.compile, backend="aot_eager", fullgraph=True)):
        model = built(device, mesh, depth=10, compiled=True, config=config)
        step = update(model)
        for _ in range(3):
            step()
            found.append(counters["stats"]["unique_graphs"])
        images = torch.randn(len(model.image_rows(BATCH)), 3, 16, 16)
        for _ in range(2):
            model.predict(images if model.takes_images else None, BATCH)
            found.append(counters["stats"]["unique_graphs"])
    return found, dict(counters["graph_break"])


@pytest.mark.parametrize("mesh", ["fsdp2+ckpt", "tp2", "tp2+sp", "tp4xdp2+2d"])
def test_blocks_share_one_graph_compiled_once(mesh: str, ranks: Ranks) -> None:
    """Graph breaks or recompilation in later steps would cost more than compilation gains."""
    for after, breaks in ranks(parse(mesh).world_size).run(graphs, mesh):
        assert after == [1, 1, 1, 2, 2], "one graph to train all blocks with, one to evaluate"
        assert not breaks


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("mesh", "count"),
    [
        pytest.param("dp1", 9, marks=pytest.mark.slow),
        pytest.param("pp1: 0-6=dp2, *=tp2", 11, marks=pytest.mark.soak),
    ],
)
def test_no_block_of_a_swin_runs_eagerly(mesh: str, count: int, ranks: Ranks) -> None:
    """Stages have a graph each for shifted windows, windows that are not, and merging, above the compiler's limit of 8.

    Under the layerwise plan, blocks of the third stage have graphs of two strategies.
    """
    for after, breaks in ranks(parse(mesh).world_size).run(graphs, mesh, SWIN):
        assert after == [count, count, count, 2 * count, 2 * count]
        assert not breaks
