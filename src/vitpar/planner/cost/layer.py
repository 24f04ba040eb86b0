"""One layer of a plan: what it computes, sends and keeps, for a micro-batch and for a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from vitpar.errors import PlannerError
from vitpar.models.config import ViTConfig
from vitpar.parallel.precision import PRECISIONS
from vitpar.planner.cost.elements import LayerElements, layer_elements
from vitpar.planner.cost.links import Groups, Links, layer_groups
from vitpar.planner.profile.profiles import Hardware, LayerKind, LayerProfile, ModelProfile, always_wrapped
from vitpar.strategy import Strategy
from vitpar.strategy.execution import REDUCE_DTYPES, LayerExecution, Rules
from vitpar.strategy.traffic import Traffic, block_traffic, head_traffic

LAYERS: Mapping[LayerKind, str] = {"embed": "embed", "block": "blocks.0", "head": "head"}
"""Name of a layer of each kind."""


@dataclass(frozen=True)
class Work:
    """Time and memory of one layer for one micro-batch on one rank."""

    forward: float
    """Seconds of computing in forward."""
    backward: float
    """Seconds of computing in backward, recomputed activations included."""
    weight_grad_time: float
    """Seconds of `backward` that compute gradients of weights, which a zero-bubble schedule may run later."""
    skew: tuple[float, float]
    """Seconds by which the slowest rank is later, in forward and in backward."""
    forward_sent: float
    """Seconds of waiting for the ranks along tensor axes in forward."""
    backward_sent: float
    """Seconds of waiting for the ranks along tensor axes in backward."""
    saved: float
    """Bytes kept from forward to backward."""
    workspace: float
    """Largest transient bytes on top of `saved`, communication buffers included."""


@dataclass(frozen=True)
class LayerParameters:
    """One layer's parameters on one rank: sizes, and the communication that a step needs for them."""

    elements: int
    """Elements that the rank stores."""
    local_bytes: float
    """Bytes of the parameters that the rank stores."""
    compute_numel: int
    """Elements that the rank computes with."""
    gathered: float
    """Bytes of the copies that the rank computes with; 0 where it computes with the stored parameters."""
    unreduced_grad_bytes: float
    """Bytes of gradients before their reduce-scatter; 0 where they have the shape of the stored parameters."""
    offloaded: bool
    """Whether parameters and optimizer state are kept in host memory."""
    gather: float
    """Seconds to gather the copies once."""
    reduce: float
    """Seconds to sum the gradients once over the ranks that see other samples."""
    gathering: float
    """Transient bytes while gathering."""
    reducing: float
    """Transient bytes while reducing."""
    sums: Mapping[str, int]
    """Gradient elements to be summed once per step over a tensor axis, by axis name."""


@dataclass(frozen=True)
class PlacedStrategy:
    """Position of a layer's ranks in the mesh, with the numbers that ``groups.placed`` takes."""

    inner: int = -1
    """Number of mesh axes inside the pipeline axis; -1 for all axes."""
    pp: int = 1
    """Pipeline stages."""
    splits: bool = False
    """Whether the schedule splits backward into gradients of inputs and of weights."""


@dataclass(frozen=True, eq=False)
class PipelinePosition:
    """A strategy at one position of the pipeline: everything that does not depend on the number of rows."""

    strategy: Strategy
    tensor: str
    """The part of the strategy that changes the arithmetic, as written in a profile."""
    groups: Groups
    """Groups of ranks that a rank communicates with."""
    executions: Mapping[LayerKind, LayerExecution]
    """Operations of a step for each kind of layer."""
    data: int
    """Parts into which the batch is split before tensor axes split it."""
    computes: int
    """Number shared by all positions with the same computing time and activations."""
    keeps: int
    """Number shared by all positions whose parameters cost the same."""

    @property
    def wrapped(self) -> bool:
        """Whether ``fully_shard`` is around layers, of all kinds or none."""
        return self.executions["block"].wrapped


class LayerCosts:
    """The layers of one model on one machine, each strategy looked up once.

    Raises PlannerError where the profiles lack what a strategy needs.
    """

    def __init__(self, config: ViTConfig, hardware: Hardware, model: ModelProfile) -> None:
        self.config, self.hardware, self.model = config, hardware.at_pace(model.pace), model
        self.links = Links(self.hardware)
        self.precision = PRECISIONS[model.precision]
        self._layers: dict[tuple[str, str, str, bool], LayerProfile] = {
            (p.layer, p.tensor, p.checkpoint, p.wrapped): p for p in model.layers
        }
        self._weight_profiles = {(p.layer, p.tensor): p for p in model.weights}
        self._seats: dict[tuple[Strategy, PlacedStrategy], PipelinePosition] = {}
        self._alike: dict[tuple[object, ...], int] = {}
        self._work: dict[tuple[LayerKind, int, int], Work] = {}
        self._parameters: dict[tuple[LayerKind, int], LayerParameters] = {}
        self._elements: dict[tuple[object, ...], LayerElements] = {}

    @property
    def peak(self) -> float | None:
        """FLOPs a second of a device in the dtype of its products; None where they are not known."""
        return self.hardware.peaks.get(str(self.precision.compute).removeprefix("torch."))

    def seat(self, strategy: Strategy, where: PlacedStrategy) -> PipelinePosition:
        """Return everything about a strategy that does not depend on the number of rows."""
        key = strategy, where
        if key not in self._seats:
            self._seats[key] = self._seated(*key)
        return self._seats[key]

    def work(self, kind: LayerKind, seat: PipelinePosition, rows: int) -> Work:
        """Return the time and memory of a micro-batch of `rows` images per stage."""
        key = kind, seat.computes, rows // seat.data
        if key not in self._work:
            self._work[key] = self._worked(kind, seat, rows)
        return self._work[key]

    def weights(self, kind: LayerKind, seat: PipelinePosition) -> LayerParameters:
        """Its parameters."""
        key = kind, seat.keeps
        if key not in self._parameters:
            self._parameters[key] = self._weighed(kind, seat)
        return self._parameters[key]

    def computing(self, kind: LayerKind, seat: PipelinePosition, rows: int) -> float:
        """Seconds of computing of a micro-batch of `rows` images over the stage, forward and backward."""
        here = rows // seat.data / _squares(seat.strategy)
        profile = self._profile(kind, seat)
        return profile.forward.seconds(here) + profile.backward.seconds(here)

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

    def _seated(self, strategy: Strategy, where: PlacedStrategy) -> PipelinePosition:
        groups = layer_groups(strategy, (where.inner, where.pp), self.hardware.ranks_per_node)
        data, tp = strategy.degree("dp") * strategy.degree("fsdp"), strategy.degree("tp")
        rules = Rules(where.pp > 1, where.splits, self.model.precision in REDUCE_DTYPES)
        wrapped = rules.wraps(strategy)
        arithmetic = strategy.tensor_flag, tp, strategy.checkpoint, wrapped, groups.j, groups.k
        parameters = self._sizes_key(strategy), strategy.tensor_flag, tp, wrapped, groups.shard, groups.replicate
        return PipelinePosition(
            strategy,
            tensor_name(strategy),
            groups,
            {kind: rules.of(strategy, layer) for kind, layer in LAYERS.items()},
            data,
            computes=self._alike.setdefault(arithmetic, len(self._alike)),
            keeps=self._alike.setdefault(parameters, len(self._alike)),
        )

    def _worked(self, kind: LayerKind, seat: PipelinePosition, rows: int) -> Work:
        here = rows // seat.data / _squares(seat.strategy)  # rows that a tensor-parallel group computes
        profile, plain = self._profile(kind, seat), self._profile(kind, seat, checkpoint="none")
        forward, backward = self._traffic(kind, seat.strategy, rows)
        return Work(
            forward=profile.forward.seconds(here),
            backward=profile.backward.seconds(here),
            weight_grad_time=(1 - plain.input_share) * plain.backward.seconds(here),
            skew=(profile.forward.skew(here), profile.backward.skew(here)),
            forward_sent=self._sent(forward, seat.groups),
            backward_sent=self._sent(backward, seat.groups),
            saved=profile.saved.of(here),
            workspace=profile.workspace.of(here) + max(self._scratch(t, seat.groups) for t in (forward, backward)),
        )

    def _sizes_key(self, strategy: Strategy) -> tuple[object, ...]:
        """Return a key for what decides the number of elements on the fullest rank; the order of axes does not."""
        degrees = strategy.degree("dp"), strategy.degree("fsdp"), strategy.degree("tp")
        return *degrees, strategy.tensor_flag, strategy.zero, strategy.offload

    def _sizes(self, kind: LayerKind, strategy: Strategy) -> LayerElements:
        key = kind, self._sizes_key(strategy)
        if key not in self._elements:
            self._elements[key] = layer_elements(self.config, LAYERS[kind], strategy)
        return self._elements[key]

    def _weighed(self, kind: LayerKind, seat: PipelinePosition) -> LayerParameters:
        elements, groups, precision = self._sizes(kind, seat.strategy), seat.groups, self.precision
        wrapped, shards, copies = seat.wrapped, not groups.shard.alone, not groups.replicate.alone
        offloaded = seat.strategy.offload and self.hardware.device != "cpu"  # there the host is the device
        gather = reduce = gathered = unreduced = gathering = reducing = 0.0
        if wrapped or precision.compute is not precision.parameters:
            gathered = elements.compute_numel * precision.compute.itemsize
        if wrapped:
            local = self._weight_profiles[kind, seat.tensor]
            share = elements.compute_numel / local.elements
            gather = local.gather.seconds * share
            unreduced = elements.compute_numel * precision.reduce.itemsize
            if shards:
                padded = elements.local_numel * groups.shard.ranks  # every part as long as the longest
                asked, given = padded * precision.compute.itemsize, padded * precision.reduce.itemsize
                gather += self.links.seconds("all_gather", groups.shard, asked)
                gathering = self.links.scratch("all_gather", groups.shard, asked)
                reduce += self.links.seconds("reduce_scatter", groups.shard, given)
                reducing = self.links.scratch("reduce_scatter", groups.shard, given)
            reduce += local.reduce * share
            if offloaded:
                gather += self._moved(elements.local_numel * precision.parameters.itemsize)
                reduce += self._moved(elements.local_numel * precision.reduce.itemsize)
        if copies:
            size = elements.local_numel * precision.reduce.itemsize
            reduce += self.links.seconds("all_reduce", groups.replicate, size)
            reducing = max(reducing, self.links.scratch("all_reduce", groups.replicate, size))
        return LayerParameters(
            elements=elements.local_numel,
            local_bytes=elements.local_numel * precision.parameters.itemsize,
            compute_numel=elements.compute_numel,
            gathered=gathered,
            unreduced_grad_bytes=unreduced,
            gather=gather,
            reduce=reduce,
            offloaded=offloaded,
            gathering=gathering,
            reducing=reducing,
            sums=elements.sums,
        )

    def _moved(self, size: float) -> float:
        """Seconds between a device and its host."""
        if self.hardware.host is None:
            raise PlannerError(
                f"{self.hardware.name} has no transfer rate between device and host, which +offload needs: profile "
                "again with vitpar profile hardware, or add [host] to the cluster file"
            )
        return self.hardware.host.seconds(size)

    def update(self, elements: int, offloaded: bool) -> float:
        """Seconds of the optimizer's step on a rank that has its device for itself."""
        host = self.hardware.host
        return elements * host.update if offloaded and host else self.model.optimizer.seconds(elements)

    def _profile(self, kind: LayerKind, seat: PipelinePosition, checkpoint: str | None = None) -> LayerProfile:
        strategy, policy = seat.strategy, checkpoint or seat.strategy.checkpoint or "none"
        wrapped = always_wrapped(seat.tensor) or seat.wrapped
        found = self._layers.get((kind, seat.tensor, policy, wrapped))
        if found is None:
            raise PlannerError(
                f"the model profile has no {kind} of {seat.tensor} with checkpoint {policy}, which '{strategy}' needs: "
                f"profile the model again with --ranks {strategy.size} or more"
            )
        return found

    def _traffic(self, kind: LayerKind, strategy: Strategy, rows: int) -> tuple[Traffic, Traffic]:
        if kind == "block":
            return block_traffic(self.config, strategy, rows)
        return head_traffic(self.config, strategy, rows) if kind == "head" else (Traffic(), Traffic())

    def _scratch(self, traffic: Traffic, groups: Groups) -> float:
        along, size = {"j": groups.j, "k": groups.k}, self.precision.compute.itemsize
        return max((self.links.scratch(c.operation, along[c.axis], c.elements * size) for c in traffic), default=0.0)

    def _sent(self, traffic: Traffic, groups: Groups) -> float:
        along = {"j": groups.j, "k": groups.k}
        return sum(
            times * self.links.seconds(c.operation, along[c.axis], c.elements * self.precision.compute.itemsize)
            for c, times in traffic.items()
        )


def _squares(strategy: Strategy) -> int:
    """Into how many parts 2.5d splits the rows on top: each is for one of its squares."""
    return dict(strategy.tensor_shape).get("d", 1)


def tensor_name(strategy: Strategy) -> str:
    """The part of a strategy that changes the arithmetic, as model profiles name it: each square of 2.5d computes as
    one of 2d."""
    if strategy.tensor_mode == "2.5d":
        return f"tp{dict(strategy.tensor_shape)['i'] ** 2}+2d"
    return f"tp{strategy.degree('tp')}{strategy.tensor_flag}"
