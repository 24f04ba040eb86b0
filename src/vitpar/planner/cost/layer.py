"""One layer of a plan: what it computes, sends and keeps, for a micro-batch and for a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from vitpar.errors import PlannerError
from vitpar.models.config import ViTConfig
from vitpar.parallel.held import layer_elements
from vitpar.parallel.precision import PRECISIONS
from vitpar.planner.cost.groups import Groups, layer_groups
from vitpar.planner.cost.links import Links
from vitpar.planner.profile.hardware import Hardware
from vitpar.planner.profile.model import LayerKind, LayerProfile, ModelProfile, WeightProfile, always_wrapped
from vitpar.strategy import Strategy
from vitpar.strategy.layout import shards_as_fsdp
from vitpar.strategy.traffic import Traffic, block_traffic, head_traffic


@dataclass(frozen=True)
class Work:
    """A micro-batch on one rank.

    forward, backward: seconds of computing, computing again included. late: how much of backward gives the gradients
    of weights, which may come later. skew: by how many seconds the slowest rank is later, in both. forward_sent,
    backward_sent: seconds that it waits for the ranks along tensor axes. saved: bytes kept from forward to backward.
    workspace: bytes on top of that at most.
    """

    forward: float
    backward: float
    late: float
    skew: tuple[float, float]
    forward_sent: float
    backward_sent: float
    saved: float
    workspace: float


@dataclass(frozen=True)
class Weights:
    """A layer's parameters on one rank.

    held: bytes of parameters that it keeps. computed: elements that it computes with. gathered: bytes of the copies
    that it computes with, 0 where these are the parameters. waiting: bytes of whole gradients, where they are not what
    the rank keeps of them. wrapped: whether ``fully_shard`` is around. gather, reduce: seconds to get the copies, and
    to add up gradients over the ranks that see other samples. sums: elements to be added up over tensor axes, by axis.
    """

    elements: int
    held: float
    computed: int
    gathered: float
    waiting: float
    wrapped: bool
    gather: float
    reduce: float
    sums: Mapping[str, int]


@dataclass(frozen=True)
class Placement:
    """Where the ranks of a layer are, as ``groups.placed`` says it."""

    inner: int = -1
    pp: int = 1


class LayerCosts:
    """The layers of one model on one machine, each strategy looked up once.

    Raises PlannerError where the profiles lack what a strategy needs.
    """

    def __init__(self, config: ViTConfig, hardware: Hardware, model: ModelProfile) -> None:
        self.config, self.hardware, self.model = config, hardware, model
        self.links = Links(hardware)
        self.numbers = PRECISIONS[model.precision]
        self._layers: dict[tuple[str, str, str, bool], LayerProfile] = {
            (p.layer, p.tensor, p.checkpoint, p.wrapped): p for p in model.layers
        }
        self._weights = {(p.layer, p.tensor): p for p in model.weights}
        self._work: dict[tuple[LayerKind, Strategy, int, Placement], Work] = {}
        self._alike: dict[tuple[object, ...], Work] = {}
        self._held: dict[tuple[LayerKind, Strategy, Placement], Weights] = {}

    def groups(self, strategy: Strategy, where: Placement) -> Groups:
        """Who a rank of the layer sends to."""
        return layer_groups(strategy, (where.inner, where.pp), self.hardware.ranks_per_node)

    def work(self, kind: LayerKind, strategy: Strategy, rows: int, where: Placement) -> Work:
        """For a micro-batch of `rows` images over the stage."""
        key = kind, strategy, rows, where
        if key not in self._work:
            self._work[key] = self._worked(*key)
        return self._work[key]

    def weights(self, kind: LayerKind, strategy: Strategy, where: Placement) -> Weights:
        """Its parameters."""
        key = kind, strategy, where
        if key not in self._held:
            self._held[key] = self._weighed(*key)
        return self._held[key]

    def crowd(self, ranks: int) -> float:
        """How many times longer than profiled a rank computes while `ranks` of a machine do so: GPUs are not shared,
        and CPU cores are as long as there are enough."""
        model = self.model
        if model.device == "cuda":
            return 1.0
        here = min(ranks, self.hardware.ranks_per_node)
        return max(1.0, here * model.threads / model.cores) / max(1.0, model.processes * model.threads / model.cores)

    def at_once(self, stage_size: int) -> float:
        """How many stages of so many ranks a machine computes at a time at full speed."""
        model = self.model
        if model.device == "cuda":
            return float("inf")
        return model.cores / model.threads / min(stage_size, self.hardware.ranks_per_node)

    def wrapped(self, strategy: Strategy) -> bool:
        """Whether ``fully_shard`` is around a layer (`Sharding.needed` in ``vitpar.parallel.data``)."""
        shards = self.groups(strategy, Placement()).shard.ranks > 1
        return shards or strategy.offload or self.numbers.compute is not self.numbers.parameters

    def _worked(self, kind: LayerKind, strategy: Strategy, rows: int, where: Placement) -> Work:
        """Strategies that compute alike work alike, however they keep parameters."""
        here = rows // strategy.degree("dp") // strategy.degree("fsdp")
        groups = self.groups(strategy, where)
        wrapped, arithmetic = self.wrapped(strategy), (strategy.tensor_flag, strategy.degree("tp"), strategy.checkpoint)
        key = kind, arithmetic, wrapped, here, groups.j, groups.k
        if key not in self._alike:
            self._alike[key] = self._computed(
                kind, strategy, rows, here / dict(strategy.tensor_shape).get("d", 1), groups
            )
        return self._alike[key]

    def _computed(self, kind: LayerKind, strategy: Strategy, rows: int, here: float, groups: Groups) -> Work:
        """here: rows that a square or another tensor-parallel group computes."""
        profile, plain = self._profile(kind, strategy), self._profile(kind, strategy, checkpoint="none")
        forward, backward = self._traffic(kind, strategy, rows)
        return Work(
            forward=profile.forward.seconds(here),
            backward=profile.backward.seconds(here),
            late=(1 - plain.input_share) * plain.backward.seconds(here),
            skew=(profile.forward.skew(here), profile.backward.skew(here)),
            forward_sent=self._sent(forward, groups),
            backward_sent=self._sent(backward, groups),
            saved=profile.saved.of(here),
            workspace=profile.workspace.of(here),
        )

    def _weighed(self, kind: LayerKind, strategy: Strategy, where: Placement) -> Weights:
        elements = layer_elements(self.config, "blocks.0" if kind == "block" else kind, strategy)
        groups, wrapped, numbers = self.groups(strategy, where), self.wrapped(strategy), self.numbers
        shards, copies = not groups.shard.alone, not groups.replicate.alone
        gather = reduce = gathered = waiting = 0.0
        if wrapped:
            local = self._weight_profile(kind, strategy)
            share = elements.computed / local.elements
            gather = local.gather.seconds * share
            gathered = elements.computed * numbers.compute.itemsize
            if shards:
                gather += self.links.seconds("all_gather", groups.shard, gathered)
                reduce += self.links.seconds(
                    "reduce_scatter", groups.shard, elements.computed * numbers.reduce.itemsize
                )
            waiting = elements.computed * numbers.reduce.itemsize
            reduce += local.reduce * share
        if copies:
            size = elements.held * (numbers.reduce if wrapped else numbers.parameters).itemsize
            reduce += self.links.seconds("all_reduce", groups.replicate, size)
        return Weights(
            elements=elements.held,
            held=elements.held * numbers.parameters.itemsize,
            computed=elements.computed,
            gathered=gathered,
            waiting=waiting,
            wrapped=wrapped,
            gather=gather,
            reduce=reduce,
            sums=elements.sums,
        )

    def _profile(self, kind: LayerKind, strategy: Strategy, checkpoint: str | None = None) -> LayerProfile:
        tensor = tensor_name(strategy)
        wrapped = always_wrapped(self.model.precision, tensor) or self.wrapped(strategy)
        policy = checkpoint or strategy.checkpoint or "none"
        found = self._layers.get((kind, tensor, policy, wrapped))
        if found is None:
            raise PlannerError(
                f"the model profile has no {kind} of {tensor} with checkpoint {policy}, which '{strategy}' needs: "
                f"profile the model again with --ranks {strategy.size} or more"
            )
        return found

    def _weight_profile(self, kind: LayerKind, strategy: Strategy) -> WeightProfile:
        return self._weights[kind, tensor_name(strategy)]

    def _traffic(self, kind: LayerKind, strategy: Strategy, rows: int) -> tuple[Traffic, Traffic]:
        if kind == "block":
            return block_traffic(self.config, strategy, rows)
        return head_traffic(self.config, strategy, rows) if kind == "head" else (Traffic(), Traffic())

    def _sent(self, traffic: Traffic, groups: Groups) -> float:
        along = {"j": groups.j, "k": groups.k}
        return sum(
            times * self.links.seconds(c.operation, along[c.axis], c.elements * self.numbers.compute.itemsize)
            for c, times in traffic.items()
        )


def tensor_name(strategy: Strategy) -> str:
    """The part of a strategy that changes the arithmetic, as model profiles name it: each square of 2.5d computes as
    one of 2d."""
    if strategy.tensor_mode == "2.5d":
        return f"tp{dict(strategy.tensor_shape)['i'] ** 2}+2d"
    return f"tp{strategy.degree('tp')}{strategy.tensor_flag}"


def gathers_always(strategy: Strategy, pipelined: bool, kind: LayerKind) -> bool:
    """Whether parameters are gathered for every use, not once a step (`_shard` in ``vitpar.parallel.parallelize``)."""
    return shards_as_fsdp(strategy) and not pipelined and kind != "head"
