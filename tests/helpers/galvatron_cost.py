"""Galvatron's cost model of 2022 for 8 GPUs on PCIe, and vitpar's search under it.

Sources: Miao et al., "Galvatron: Efficient Transformer Training over Multiple GPUs Using Automatic Parallelism", VLDB
2023, and its published code of 2022. Times are in ms, sizes in MB of 2**20 bytes. Galvatron's search rounds the memory
of each layer up to whole MB, so that fewer layers fit than without rounding. Plans are compared under that rounding.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import ClassVar

import numpy as np

from vitpar.models.config import ModelConfig
from vitpar.planner.cost.layer import LayerCosts
from vitpar.planner.cost.memory import Memory
from vitpar.planner.cost.price import Hops, Price
from vitpar.planner.search.best import Search
from vitpar.planner.search.bounds import Machine, PlanOutline
from vitpar.planner.search.costed import ROUNDING
from vitpar.planner.search.loads import Array, Loads
from vitpar.planner.search.options import Choices
from vitpar.planner.search.ranking import SearchEffort
from vitpar.planner.search.space import ROLES, Space
from vitpar.planner.search.tables import Moves
from vitpar.strategy import Plan, Strategy
from vitpar.strategy.stages import split_blocks

GPUS, MB = 8, 2**20
CONTEXT = 1024  # MB of a GPU that the model cannot use
OVERLAP = 1.3
COMMUNICATION = {
    **{(1, 8, 1): 0.21531, (1, 4, 0): 0.22014, (1, 4, 1): 0.22652, (1, 2, 0): 0.27161, (1, 2, 1): 0.27799},
    **{(2, 4, 1): 0.23075, (2, 2, 0): 0.22415, (2, 2, 1): 0.27520, (4, 2, 1): 0.26491},
}
"""ms per MB of a message, by (pipeline degree, ranks, 1 if the ranks are neighbours)."""


@dataclass(frozen=True)
class LayerType:
    """Constants of a type of layers."""

    parameters: float
    """MB of a layer's parameters in fp32."""
    saved: dict[int, float]
    """MB of saved activations per sample, by tp degree."""
    forward: float
    """ms of a forward per sample."""
    activation: float
    """MB of the activation of a sample that tp ranks all-reduce."""
    decoder: bool = False
    """Whether it is a layer of a decoder, which all-reduces six activations instead of four."""


@dataclass(frozen=True)
class CostModel:
    """The cost model with the constants of one model."""

    config: ModelConfig
    """The model."""
    types: dict[str, LayerType]
    """Types of layers by vitpar's kind of blocks. A kind without a type costs nothing."""
    states: float
    """MB of parameters, gradients and optimizer state outside the layers."""
    outside: float
    """MB of activations outside the layers per sample."""
    chunks: Callable[[float, int, Strategy], float]
    """Function (samples of a data-parallel part, pipeline degree, strategy) that gives the micro-batches of a step."""
    overhead: float = 0.0
    """ms per layer of data-parallel plans."""
    roles: ClassVar[tuple[str, ...]] = ROLES
    """Roles of the plans that the cost model can price."""
    flags: ClassVar[tuple[str, ...]] = ()
    """Flags of their strategies."""

    def knows(self, pp: int, strategy: Strategy) -> bool:
        """Return whether the cost model can price `strategy`: dp or fsdp outside tp, tp over neighbours."""
        roles = [axis.role for axis in strategy.axes]
        data = [role for role in roles if role != "tp"]
        return len(data) <= 1 and roles == [*data, *(["tp"] if strategy.has("tp") else [])] and pp in (1, 2, 4, 8)

    @property
    def one_type(self) -> bool:
        """Whether all layers are of one type. Then Galvatron gives all stages the same strategies."""
        return len(self.types) == 1

    def layer_ms(self, kind: str, pp: int, strategy: Strategy, batch_size: int) -> float:
        """Return the milliseconds of a layer for all samples of a step, in a pipeline of `pp` stages."""
        if kind not in self.types:
            return 0.0
        layer, tp, data = self.types[kind], strategy.degree("tp"), strategy.degree("dp") * strategy.degree("fsdp")
        samples, fsdp = batch_size / data, strategy.has("fsdp")
        forward = layer.forward * samples / tp
        tensor = message = rate = 0.0
        if tp > 1:
            size = samples * layer.activation * (6 if layer.decoder else 4)
            tensor = 2 * (tp - 1) / tp * size * COMMUNICATION[pp, tp, 1]
        if data > 1:
            message, rate = 2 * (data - 1) / data * layer.parameters / tp, COMMUNICATION[pp, data, int(tp == 1)]
        share = 1.0  # of backward that gradients overlap
        if tp > 1 and data > 1 and (layer.decoder or pp > 1 or tp > 2):
            share = 2 / 3 if layer.decoder and pp == 1 else 1 / 2
        # Without tp and fsdp, stages of a pipeline overlap what is left of the messages.
        left = 1 / pp if tp == 1 and not fsdp else 1.0
        exposed = overlapped(message, rate, share * 2 * forward, OVERLAP, left) - share * 2 * forward
        exposed += self.overhead * (data > 1)
        computed = 3 * forward + tensor
        if pp > 1:
            chunks = self.chunks(samples, pp, strategy)
            computed *= (pp + chunks - 1) / (pp * chunks)
        return 1.1 * (computed + exposed + message * rate / 2 * fsdp)

    def move_ms(self, pp: int, before: Strategy, behind: Strategy, batch_size: int) -> float:
        """Return the milliseconds to gather activations for a layer with more ranks along tp than the one before."""
        tp = behind.degree("tp")
        if tp <= before.degree("tp"):
            return 0.0
        samples = batch_size / behind.degree("dp") / behind.degree("fsdp")
        return (tp - 1) / tp * 2 * samples * COMMUNICATION[pp, tp, 1]

    def layer_mb(self, kind: str, strategy: Strategy, batch_size: int) -> int:
        """Return the memory of a layer in MB, rounded up."""
        if kind not in self.types:
            return 0
        layer, tp, data = self.types[kind], strategy.degree("tp"), strategy.degree("dp") * strategy.degree("fsdp")
        part = 1 / data + 0.025 if strategy.has("fsdp") else 1.0
        return math.ceil(4 * layer.parameters / tp * part + layer.saved[tp] * batch_size / data)

    def other_mb(self, pp: int, batch_size: int) -> int:
        """Return the memory outside the layers in MB, rounded up."""
        return math.ceil(self.states + self.outside * batch_size * pp / GPUS + CONTEXT)

    def price(self, plan: Plan, batch_size: int) -> Price:
        """Return the price of a plan.

        The time of a pipeline is the sum over all layers, with the share of idle time in each of them. That is the time
        of the longest stage times their number where all stages have the same strategies, as in plans of one type.
        """
        pp, layers = plan.pipeline_degree, plan.strategies(self.config.layer_names)
        blocks = [(self.config.layers[name].kind, layers[name]) for name in self.config.blocks]
        times, memory = [], []
        for number, stage in enumerate(split_blocks(len(blocks), pp, plan.split)):
            inside = [blocks[index] for index in stage]
            listed = [strategy for kind, strategy in inside if kind in self.types]
            taken = sum(self.layer_mb(kind, strategy, batch_size) for kind, strategy in inside)
            taken += self.other_mb(pp, batch_size) if number == 0 or self.one_type else 0
            memory.append(Memory(taken * MB, 0, 0, 0, 0, 0, 0))
            moves = sum(self.move_ms(pp, *pair, batch_size) for pair in pairwise(listed))
            times.append(sum(self.layer_ms(kind, pp, strategy, batch_size) for kind, strategy in inside) + moves)
        seconds = (pp * max(times) if self.one_type else sum(times)) / 1e3
        return Price(plan, batch_size, seconds, {}, tuple(memory), ())


def overlapped(message: float, rate: float, backward: float, slower: float, left: float = 1.0) -> float:
    """Return the time of a message overlapped with a backward: both take longer while they overlap.

    slower: factor by which both take longer
    left: share of the rest of a message behind backward that takes time
    """
    sends, computes = message * rate * slower, backward * slower
    if sends > computes:
        return computes + left * (message - computes / (rate * slower)) * rate
    return sends + backward - sends / slower


@dataclass(frozen=True)
class _Space(Space):
    """Plans that the cost model can price. It fixes the number of micro-batches itself."""

    knows: Callable[[int, Strategy], bool] = lambda pp, strategy: True
    """Function (pipeline degree, strategy): whether the cost model can price it."""

    def microbatches(self, pipeline: Plan, batch_size: int) -> list[int]:
        return super().microbatches(pipeline, batch_size)[:1]

    def strategies(self, size: int) -> tuple[Strategy, ...]:
        return tuple(s for s in super().strategies(size) if self.knows(self.ranks // size, s))


class UnderItsModel(Search):
    """vitpar's search with the prices of Galvatron's cost model.

    A plan has one micro-batch in vitpar's terms: then the time of a pipeline is the sum over its stages, or with times
    in `Loads.once` that of the longest one.
    """

    def __init__(self, costs: LayerCosts, its_model: CostModel, batch_sizes: tuple[int, ...]) -> None:
        roles, flags = its_model.roles, its_model.flags
        space = _Space(
            costs.config, GPUS, batch_sizes, roles=roles, flags=flags, schedules=("gpipe",), knows=its_model.knows
        )
        super().__init__(space, costs, effort=SearchEffort(simpler=0.0))
        self._its_model = its_model

    def options(self, outline: PlanOutline) -> Choices:
        pp, batch, its_model, config = (
            outline.pipeline.pipeline_degree,
            outline.batch_size,
            self._its_model,
            self.costs.config,
        )
        found = [
            strategy
            for strategy in self.space.strategies(GPUS // pp)
            if batch % (strategy.degree("dp") * strategy.degree("fsdp")) == 0
        ]
        kinds = tuple(config.kinds)
        loads = {field.name: np.zeros((len(kinds), len(found))) for field in fields(Loads)}
        loads["kept"][0] = its_model.other_mb(pp, batch) * MB
        for kind in its_model.types:
            row, times = kinds.index(kind), np.array([its_model.layer_ms(kind, pp, s, batch) / 1e3 for s in found])
            loads["once" if its_model.one_type else "computes"][row] = times * (pp if its_model.one_type else 1)
            loads["kept"][row] = [its_model.layer_mb(kind, strategy, batch) * MB for strategy in found]
        fronts = tuple(
            np.array([number for number, strategy in enumerate(found) if section.fits(strategy)], dtype=np.int64)
            for section in self.space.sections.sections
        )
        return Choices(tuple((strategy,) for strategy in found), Loads(**loads), fronts)

    def machine(self, outline: PlanOutline, budget: float) -> Machine:
        # With one type of layers the cost model counts memory outside the layers on every stage, vitpar's search only
        # on the first.
        hops = Hops((0.0,) * (outline.pipeline.num_stages - 1))
        return Machine(budget=budget * (1 + ROUNDING), hops=lambda share: hops)

    def uniform_options(self, outline: PlanOutline) -> Choices:
        return self.options(outline)

    def moves(self, outline: PlanOutline) -> Moves:
        pp, batch = outline.pipeline.pipeline_degree, outline.batch_size

        def moves(elements: int, strategies: tuple[Strategy, ...]) -> Array:
            # The longest of several stages is not bounded by what moves in another one.
            part = 1e-3 if pp == 1 or not self._its_model.one_type else 0.0
            return part * np.array([[self._its_model.move_ms(pp, a, b, batch) for b in strategies] for a in strategies])

        return moves

    def _ideal(self, outline: PlanOutline) -> float:
        return 0.0

    def _price(self, plan: Plan, batch_size: int) -> Price:
        return self._its_model.price(plan, batch_size)

    def place_bytes(self, plan: Plan, batch_size: int) -> tuple[float, ...]:
        return tuple(memory.total for memory in self.price(plan, batch_size).memory)
