"""Best plans side by side: one for each model, image size, cluster and batch size."""

from __future__ import annotations

from dataclasses import dataclass

from vitpar.errors import PlannerError
from vitpar.planner.automatic import run_search
from vitpar.planner.cost.layer import LayerCosts
from vitpar.planner.cost.price import Price
from vitpar.planner.search.best import Progress, Search
from vitpar.planner.training_time import TrainingLength, TrainingTime, training_time


@dataclass(frozen=True)
class Combination:
    """A model, a cluster and a batch size to find a plan for."""

    model: str
    """Name of the model."""
    image_size: int
    """Pixels a side."""
    cluster: str
    """Name of the cluster, or of the profiled machine."""
    batch_size: int
    """Global images per step."""

    def __str__(self) -> str:
        return f"{self.setup} on {self.cluster}, batch {self.batch_size:,}"

    @property
    def setup(self) -> str:
        """Model and image size in words, as in `vit_base_patch16_224, 384 pixels`."""
        return f"{self.model}, {self.image_size} pixels"


@dataclass(frozen=True)
class BestPlan:
    """The best plan of a search, in figures that can be compared with those of other searches."""

    price: Price
    """Time and memory of a step."""
    costs: LayerCosts
    """Costs of layers that it was priced with."""
    budget: float
    """Memory limit of a rank, in bytes."""
    training: TrainingTime
    """Duration of the complete training."""


@dataclass(frozen=True)
class Compared:
    """One row of a comparison."""

    combination: Combination
    """Model, cluster and batch size of the search."""
    best: BestPlan | None
    """The best plan; None if there is none."""
    why: str = ""
    """Reason why there is no plan, as the sentence of an error; empty if there is one."""


def compared(
    combination: Combination, searching: Search, budget: float, length: TrainingLength, progress: Progress
) -> Compared:
    """Search the best plan of a combination.

    searching: search over its plans
    budget: bytes of memory per rank
    """
    try:
        best = run_search(searching, budget, progress, most=0).plans[0]
    except PlannerError as error:
        return Compared(combination, None, str(error))
    return Compared(combination, BestPlan(best, searching.costs, budget, training_time(best, length)))
