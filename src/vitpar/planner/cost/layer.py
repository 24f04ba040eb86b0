"""Cost of one layer on one rank: seconds and bytes per micro-batch (`Work`) and per step (`LayerParameters`)."""

from __future__ import annotations

from collections import Counter

from vitpar.errors import PlannerError
from vitpar.models.config import ModelConfig
from vitpar.models.derived import with_frozen
from vitpar.planner.cost.elements import layer_elements
from vitpar.planner.cost.links import Groups, Links, layer_groups
from vitpar.planner.cost.records import LayerParameters, PipelinePosition, PlacedStrategy, PlannedTeacher, Work
from vitpar.planner.profile.activations import frozen_share, passing_elements
from vitpar.planner.profile.profiles import Hardware, LayerKind, LayerProfile, ModelProfile, always_wrapped
from vitpar.strategy import Strategy
from vitpar.strategy.execution import REDUCE_DTYPES, Rules
from vitpar.strategy.precisions import PRECISION_TYPES
from vitpar.strategy.traffic import Traffic, layer_traffic, traffic_beside_products


class LayerCosts:
    """Cached costs of a model's layers on one machine, from its hardware profile and its model profile.

    frozen: names of the parameters that are not trained. `config` then describes what their backward computes.
    teacher: teacher of a distillation; None without one.

    Its methods raise PlannerError if the profiles lack a measurement that a strategy needs.
    """

    def __init__(
        self,
        config: ModelConfig,
        hardware: Hardware,
        model: ModelProfile,
        frozen: frozenset[str] = frozenset(),
        teacher: PlannedTeacher | None = None,
    ) -> None:
        overlap = hardware.overlap and hardware.overlap.at_most_in_turn()
        self.whole, self.frozen, self.hardware = config, frozen, hardware.model_copy(update={"overlap": overlap})
        self.config, self.teacher = with_frozen(config, frozen), teacher
        # Kinds in profiles of kinds of layers, which may be frozen.
        self._profiled = {kind: config.layers[layer.name].kind for kind, layer in self.config.kinds.items()}
        self.model = model
        self.links = Links(self.hardware)
        self.precision = PRECISION_TYPES[model.precision]
        self._layers: dict[tuple[str, str, str, bool], LayerProfile] = {
            (p.layer, p.tensor, p.checkpoint, p.wrapped): p for p in model.layers
        }
        self._weight_profiles = {(p.layer, p.tensor): p for p in model.weights}
        self._seats: dict[tuple[Strategy, PlacedStrategy], PipelinePosition] = {}
        self._alike: dict[tuple[object, ...], int] = {}
        self._work: dict[tuple[LayerKind, int, int], Work] = {}
        self._parameters: dict[tuple[LayerKind, int], LayerParameters] = {}

    def reserve(self, number: int) -> None:
        """Keep `number` bytes of each device's memory from plans."""
        reserved = self.hardware.reserved_bytes + number
        self.hardware = self.hardware.model_copy(update={"reserved_bytes": reserved})

    @property
    def passes_gradients(self) -> bool:
        """Return whether all activations between layers have gradients: whether the first layer is trained."""
        return self.config.first_layer.backward != "nothing"

    def rules(self, where: PlacedStrategy) -> Rules:
        """Return the rules of execution at this place in the pipeline."""
        return Rules(where.pp > 1, where.splits, self.model.precision in REDUCE_DTYPES)

    def position(self, strategy: Strategy, where: PlacedStrategy) -> PipelinePosition:
        """Return the strategy's groups and execution at this place in the pipeline."""
        key = strategy, where
        if key in self._seats:
            return self._seats[key]
        groups = layer_groups(strategy, (where.inner, where.pp), self.hardware.ranks_per_node, where.stage)
        dp, fsdp, tp = (strategy.degree(role) for role in ("dp", "fsdp", "tp"))
        rules = self.rules(where)
        wrapped = rules.wraps(strategy)
        arithmetic = strategy.tensor_flag, tp, strategy.checkpoint, wrapped, groups.j, groups.k, where.splits
        # The order of the axes does not change what a rank stores.
        sizes = dp, fsdp, tp, strategy.tensor_flag, strategy.zero, strategy.offload
        parameters = *sizes, wrapped, groups.shard, groups.replicate, groups.partial
        self._seats[key] = PipelinePosition(
            strategy,
            groups,
            {kind: rules.of(strategy, layer) for kind, layer in self.config.kinds.items()},
            dp * fsdp,
            where.splits,
            computes=self._alike.setdefault(arithmetic, len(self._alike)),
            keeps=self._alike.setdefault(parameters, len(self._alike)),
        )
        return self._seats[key]

    def work(self, kind: LayerKind, position: PipelinePosition, rows: int) -> Work:
        """Return the time and memory of a micro-batch.

        rows: images of the micro-batch over all ranks of the stage.
        """
        key = kind, position.computes, rows // position.data
        if key in self._work:
            return self._work[key]
        # Rows of one tensor-parallel group. The divisions are exact: plans that do not divide are refused, not rounded.
        here = rows // position.data / _squares(position.strategy)
        way = position.strategy, position.wrapped
        profile, layer = self._profile(kind, *way), self.config.kinds[kind]
        forward, backward = layer_traffic(layer, position.strategy, rows)
        seconds, weights = self._backward(kind, *way, here)
        saved, workspace = profile.saved.of(here), profile.workspace.of(here)
        beside = self._hidden(kind, position, rows, seconds)
        if layer.backward == "nothing":
            # All is transient, but the workspace of backward does not exist.
            saved, workspace = 0.0, passing_elements(layer, position.strategy) * here * self.precision.compute.itemsize
        elif layer.frozen:
            saved *= frozen_share(layer, position.strategy)
        self._work[key] = Work(
            forward=profile.forward.seconds(here),
            backward=seconds,
            weight_grad_time=weights,
            forward_sent=self._sent(forward, position.groups),
            backward_sent=self._sent(backward, position.groups) - beside,
            # On a CPU, nothing else is sent while a rank waits.
            beside=beside if self.hardware.device == "cuda" else 0.0,
            across=max(position.groups.j.nodes, position.groups.k.nodes) > 1,
            saved=saved,
            workspace=workspace,
        )
        return self._work[key]

    def weights(self, kind: LayerKind, position: PipelinePosition) -> LayerParameters:
        """Return the sizes of a layer's parameters and the cost of gathering and reducing them."""
        key = kind, position.keeps
        if key in self._parameters:
            return self._parameters[key]
        elements = layer_elements(self.config.kinds[kind], position.strategy)
        trained = layer_elements(self.config.kinds[kind], position.strategy, trained=True)
        groups, precision = position.groups, self.precision
        wrapped, shards, copies = position.wrapped, not groups.shard.alone, not groups.replicate.alone
        # On a CPU, host memory is device memory: offloading saves nothing there.
        offloaded = position.strategy.offload and self.hardware.device != "cpu"
        gather = reduce = summed = gathered = unreduced = 0.0
        # Gradients of tables are summed over the world, which `sharing_seconds` prices.
        compute_numel, local_numel = elements.compute_numel - elements.tables, elements.local_numel - elements.tables
        trained_compute, trained_local = trained.compute_numel - trained.tables, trained.local_numel - trained.tables
        if wrapped or precision.compute != precision.parameters:
            gathered = compute_numel * precision.compute.itemsize
        if wrapped:
            local = self._weight_profiles[self._profiled[kind], tensor_name(position.strategy)]
            share = elements.compute_numel / local.elements
            gather = local.gather.seconds * share
            unreduced = trained_compute * precision.reduce.itemsize
            if shards:
                # FSDP2 pads each shard to the size of the first, so the collectives carry more than that.
                padded, given = local_numel * groups.shard.ranks, trained_local * groups.shard.ranks
                # Shards are cast to the compute dtype before the all-gather, gradients are reduced in their own dtype.
                asked, given = padded * precision.compute.itemsize, given * precision.reduce.itemsize
                gather += self.links.seconds("all_gather", groups.shard, asked)
                if given:
                    reduce += self.links.seconds("reduce_scatter", groups.shard, given)
            reduce += local.reduce * trained_compute / local.elements
            if offloaded:
                # FSDP2 copies a shard to the device in the dtype it is stored in, and casts it there.
                gather += self._moved(local_numel * precision.parameters.itemsize)
                if trained_local:
                    reduce += self._moved(trained_local * precision.reduce.itemsize)
        # Layers without fully_shard sum partial gradients together with those of replicas.
        joint = 0 if wrapped else elements.sums.get("j", 0)
        apart = (trained_local - joint) * copies
        # Copies are summed after the reduce-scatter, so the all-reduce carries one shard.
        copies_across = False
        for numel, group in ((apart, groups.replicate), (joint, groups.partial)):
            size = numel * precision.reduce.itemsize
            if size:
                copies_across |= group.nodes > 1
                summed += self.links.seconds("all_reduce", group, size)
        reduce += summed
        self._parameters[key] = LayerParameters(
            trained_elements=trained.local_numel,
            local_bytes=elements.local_numel * precision.parameters.itemsize,
            gradient_bytes=trained.local_numel * precision.parameters.itemsize,
            gathered=gathered,
            unreduced_grad_bytes=unreduced,
            gather=gather,
            reduce=reduce,
            summed=summed,
            shard_across=groups.shard.nodes > 1,
            copies_across=copies_across,
            offloaded=offloaded,
            message=(apart + joint) * precision.parameters.itemsize * (not wrapped),
            sums=elements.sums if wrapped else {},
        )
        return self._parameters[key]

    def computing(self, kind: LayerKind, strategy: Strategy, wrapped: bool, rows: int) -> float:
        """Return the seconds that a rank computes for a micro-batch, forward and backward, without communication.

        wrapped: whether ``fully_shard`` wraps the layer.
        rows: images of the micro-batch over all ranks of the stage.
        """
        here = rows // (strategy.degree("dp") * strategy.degree("fsdp")) / _squares(strategy)
        profile = self._profile(kind, strategy, wrapped)
        return profile.forward.seconds(here) + self._backward(kind, strategy, wrapped, here)[0]

    def _backward(self, kind: LayerKind, strategy: Strategy, wrapped: bool, here: float) -> tuple[float, float]:
        """Return the seconds of (backward, its gradients of weights) for `here` rows of a tensor-parallel group."""
        computed = self.config.kinds[kind].backward
        if computed == "nothing":
            return 0.0, 0.0
        profile, plain = (self._profile(kind, strategy, wrapped, policy) for policy in (strategy.checkpoint, "none"))
        seconds = profile.backward.seconds(here)
        # input_share is measured without checkpointing only: schedules that split backward refuse checkpoints.
        weights = (1 - plain.input_share) * plain.backward.seconds(here)
        if computed == "inputs":
            return max(0.0, seconds - weights), 0.0
        # The profile is of a layer that trains all. Products for gradients of weights take their time by their FLOPs.
        layer = self.config.kinds[kind]
        every = sum(part.flops for part in layer.parts)
        needless = weights * (1 - layer.weight_flops / every) if layer.frozen and every else 0.0
        return max(0.0, seconds - needless), weights - needless

    def _moved(self, size: float) -> float:
        """Return the seconds to copy `size` bytes between a device and host memory.

        Raises PlannerError if the hardware profile has no such rate.
        """
        if self.hardware.host is None:
            raise PlannerError(
                f"{self.hardware.name} has no transfer rate between device and host, which +offload needs: profile "
                "again with `vitpar profile hardware`, or add [host] to the cluster file"
            )
        return self.hardware.host.seconds(size)

    def teacher_bytes(self, ranks: int) -> float:
        """Return the bytes of the teacher's parameters on a rank. The rest of its forward is freed before a step."""
        return 0.0 if self.teacher is None else self.teacher.elements(ranks) * self.precision.parameters.itemsize

    def teacher_seconds(self, batch_size: int, ranks: int) -> float:
        """Return the seconds of the teacher's forward on `batch_size` images over `ranks` ranks.

        Its products run as fast as the model's do in forward, without communication.
        """
        if self.teacher is None:
            return 0.0
        rows, profiled = batch_size / ranks, dict[LayerKind, LayerProfile]()
        for layer in self.model.layers:
            if (layer.tensor, layer.checkpoint) == ("tp1", "none"):
                profiled.setdefault(layer.layer, layer)
        seconds = sum(profiled[layer.kind].forward.seconds(rows) for layer in self.whole.layers.values())
        return seconds * self.teacher.config.flops / self.whole.flops

    def update(self, elements: int, offloaded: bool) -> float:
        """Return the seconds of the optimizer's step on `elements` parameters.

        offloaded: whether the optimizer runs on the host.
        """
        host = self.hardware.host
        return elements * host.update if offloaded and host else self.model.optimizer.seconds(elements)

    def _profile(
        self, kind: LayerKind, strategy: Strategy, wrapped: bool, checkpoint: str | None = None
    ) -> LayerProfile:
        """Return the measured profile of a layer.

        checkpoint: policy to look up; None for that of the strategy.

        Raises PlannerError if it was not measured.
        """
        policy, tensor = checkpoint or strategy.checkpoint or "none", tensor_name(strategy)
        wrapped = wrapped or always_wrapped(tensor)
        profile = self._layers.get((self._profiled[kind], tensor, policy, wrapped))
        if profile is None:
            raise PlannerError(
                f"the model profile has no {self._profiled[kind]} of {tensor} with checkpoint {policy} for "
                f"'{strategy}': profile the model again with --ranks {strategy.size} or more"
            )
        return profile

    def _sent(self, traffic: Traffic, groups: Groups) -> float:
        """Return the seconds of all collectives together."""
        size = self.precision.compute.itemsize
        return sum(
            times * self.links.seconds(c.operation, groups.along(c.axis), c.elements * size)
            for c, times in traffic.items()
        )

    def _hidden(self, kind: LayerKind, position: PipelinePosition, rows: int, backward: float) -> float:
        """Return the seconds by which backward is shorter because products run beside its communication.

        backward: seconds of computing.
        """
        if position.splits:
            return 0.0
        overlap, hidden = self.hardware.overlap, 0.0
        slow = (overlap.compute, overlap.communication) if overlap else (1.0, 1.0)
        for collective, times, share in traffic_beside_products(self.config.kinds[kind], position.strategy, rows):
            sending = self._sent(Counter({collective: times}), position.groups)
            # Both run, each at its slower speed, until one of them is done.
            both = min(share * backward * slow[0], sending * slow[1])
            hidden += both * (1 / slow[0] + 1 / slow[1] - 1)
        return hidden


def _squares(strategy: Strategy) -> int:
    """Return the depth d of a 2.5d mesh [d, q, q], which splits the rows over its d squares; 1 for other modes."""
    return dict(strategy.tensor_shape).get("d", 1)


def tensor_name(strategy: Strategy) -> str:
    """Return the name of a strategy's tensor-parallel part in model profiles, such as tp4+sp; tp1 for none.

    Each q × q square of 2.5d computes as 2d on q² ranks, so both share a profile.
    """
    if strategy.tensor_mode == "2.5d":
        return f"tp{dict(strategy.tensor_shape)['i'] ** 2}+2d"
    return f"tp{strategy.degree('tp')}{strategy.tensor_flag}"
