"""Records of costs: the work of one layer, its parameters, its position in a pipeline; the teacher of a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from vitpar.models.config import ModelConfig
from vitpar.planner.cost.elements import layer_parameters
from vitpar.planner.cost.links import Groups
from vitpar.planner.profile.profiles import LayerKind
from vitpar.recipe.sections.training import DistillSection
from vitpar.strategy import Strategy
from vitpar.strategy.execution import LayerExecution


@dataclass(frozen=True)
class Work:
    """Time and memory of one layer for one micro-batch on one rank."""

    forward: float
    """Seconds of computing in forward."""
    backward: float
    """Seconds of computing in backward, recomputed activations included."""
    weight_grad_time: float
    """Seconds of `backward` spent on gradients of weights, which a zero-bubble schedule may run later."""
    forward_sent: float
    """Seconds of tensor-parallel communication in forward; the rank waits for it."""
    backward_sent: float
    """Seconds of tensor-parallel communication in backward that the rank waits for: without what products hide."""
    beside: float
    """Seconds of `backward` that hide communication, which occupies the wire meanwhile."""
    across: bool
    """Whether tensor-parallel groups are on several nodes."""
    saved: float
    """Bytes kept from forward to backward."""
    workspace: float
    """Peak of transient bytes on top of `saved`, communication buffers included."""


@dataclass(frozen=True)
class LayerParameters:
    """One layer's parameters on one rank: their sizes, and the cost of gathering them and reducing their gradients."""

    trained_elements: int
    """Elements that the rank stores and that have gradients and optimizer state."""
    local_bytes: float
    """Bytes of the parameters that the rank stores."""
    gradient_bytes: float
    """Bytes of reduced gradients."""
    gathered: float
    """Bytes of gathered or 16-bit copies to compute with; 0 if the rank computes with the stored parameters."""
    unreduced_grad_bytes: float
    """Bytes of gradients before ``fully_shard`` reduces them; 0 for a layer that it does not wrap."""
    offloaded: bool
    """Whether parameters and optimizer state are in host memory."""
    gather: float
    """Seconds to gather the parameters once."""
    reduce: float
    """Seconds to reduce the gradients once over the data-parallel ranks."""
    summed: float
    """Seconds of `reduce` in which copies of gradients are summed, after the reduce-scatter if there is one."""
    shard_across: bool
    """Whether the ranks that shard the parameters are on several nodes."""
    copies_across: bool
    """Whether the ranks that sum copies of gradients are on several nodes."""
    message: float
    """Bytes of gradients that `GradientSum` sums; 0 under ``fully_shard``."""
    sums: Mapping[str, int]
    """Elements of partial gradients to be summed after the last backward over a tensor axis, by axis name."""


@dataclass(frozen=True)
class PlacedStrategy:
    """The facts about a pipeline that decide the ranks and the execution of a layer.

    The first two fields are what ``vitpar.planner.cost.links.placed`` returns.
    """

    inner: int = -1
    """Number of strategy axes inside the pipeline axis in rank order; -1 if pp is outermost."""
    pp: int = 1
    """Pipeline degree."""
    splits: bool = False
    """Whether the schedule splits backward into gradients of inputs and of weights."""
    stage: int | None = None
    """Index on the pp axis, from `stage_place`; None for the fastest groups of all stages."""


@dataclass(frozen=True, eq=False)
class PipelinePosition:
    """A strategy under one `PlacedStrategy`: everything that does not depend on the micro-batch size."""

    strategy: Strategy
    """Strategy of the layer."""
    groups: Groups
    """Groups of ranks that a rank communicates with."""
    executions: Mapping[LayerKind, LayerExecution]
    """When parameters are gathered and gradients reduced, by kind of layer."""
    data: int
    """Number of parts that dp and fsdp split the batch into."""
    splits: bool
    """Whether the schedule splits backward into gradients of inputs and of weights."""
    computes: int
    """Cache key: equal for all positions with the same `Work` for equal rows per data-parallel rank."""
    keeps: int
    """Cache key: equal for all positions with the same `LayerParameters`."""

    @property
    def wrapped(self) -> bool:
        """Return whether ``fully_shard`` wraps the layers; the rule is the same for every kind of layer."""
        return next(iter(self.executions.values())).wrapped


@dataclass(frozen=True)
class StageLayer:
    """One layer of a stage with its costs."""

    kind: LayerKind
    """Kind of layer."""
    position: PipelinePosition
    """Its strategy and groups of ranks."""
    work: Work
    """Time and memory of one micro-batch."""
    weights: LayerParameters
    """Sizes and communication of the parameters."""
    moved: tuple[float, float] = (0.0, 0.0)
    """Seconds to redistribute the layer's input: (activations in forward, their gradients in backward)."""

    @property
    def execution(self) -> LayerExecution:
        """Return when parameters are gathered and gradients reduced."""
        return self.position.executions[self.kind]


@dataclass(frozen=True)
class PlannedTeacher:
    """Teacher of a distillation, or the average of the model as its teacher: frozen, beside the model that is trained.

    It takes a constant part of a step's time and of a rank's memory.
    """

    config: ModelConfig
    """Configuration of the teacher."""
    distill: DistillSection | None
    """Settings of the recipe, with the plan of the teacher; None for the average, which is a part of the state."""
    group: int = 1
    """Number that has to divide the images of a micro-batch on a rank (``Task.sample_group``)."""

    def elements(self, ranks: int) -> int:
        """Return the parameters that the fullest of `ranks` ranks stores.

        Raises StrategyError if the plan does not fit this number of ranks.
        """
        if self.distill is None:
            return 0
        return sum(layer_parameters(self.config, self.distill.teacher_plan(ranks)).values())
