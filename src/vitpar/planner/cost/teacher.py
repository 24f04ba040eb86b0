"""A frozen teacher beside the model that is trained: a constant part of a step's time and of a rank's memory."""

from __future__ import annotations

from dataclasses import dataclass

from vitpar.models.config import ModelConfig
from vitpar.planner.cost.elements import layer_parameters
from vitpar.recipe.sections.training import DistillSection
from vitpar.recipe.teacher_plan import teacher_plan


@dataclass(frozen=True)
class PlannedTeacher:
    """Teacher of a distillation, or the average of the model as its teacher."""

    config: ModelConfig
    """Configuration of the teacher."""
    distill: DistillSection | None
    """Settings of the recipe, with the plan of the teacher; None for the average, which is a part of the state."""
    group: int = 1
    """Number that has to divide the images of a micro-batch on a rank (``Task.sample_group``)."""

    @property
    def forward_flops(self) -> float:
        """Floating-point operations of one image's forward: a third of those of a training step."""
        return self.config.flops / 3

    def elements(self, ranks: int) -> int:
        """Return the parameters that the fullest of `ranks` ranks stores.

        Raises StrategyError if the plan does not fit this number of ranks.
        """
        if self.distill is None:
            return 0
        return sum(layer_parameters(self.config, teacher_plan(self.distill, ranks)).values())
