"""Strategies: the language, plan objects, their JSON format, and layouts, batches and ranks that follow from a plan.

Pure Python without torch. Plans as JSON (`vitpar.strategy.plan_json`) need pydantic and are not imported here.
"""

from vitpar.strategy.batch import BatchArithmetic, batch_arithmetic
from vitpar.strategy.execution import Communication, Execution
from vitpar.strategy.grammar import parse
from vitpar.strategy.layer import CHECKPOINT_POLICIES, ROLES, TENSOR_MODES, Axis, Role, Strategy
from vitpar.strategy.layout import ActivationPart, image_layout, output_layout, token_layout
from vitpar.strategy.plan import SPLITS, Plan
from vitpar.strategy.schedules import SCHEDULES, Schedule
from vitpar.strategy.stages import (
    place_of_rank,
    rank_of_place,
    rank_of_stage,
    split_blocks,
    stage_layers,
    stages_of_rank,
)
from vitpar.strategy.validate import validate

__all__ = [
    "CHECKPOINT_POLICIES",
    "ROLES",
    "SCHEDULES",
    "SPLITS",
    "TENSOR_MODES",
    "ActivationPart",
    "Axis",
    "BatchArithmetic",
    "Communication",
    "Execution",
    "Plan",
    "Role",
    "Schedule",
    "Strategy",
    "batch_arithmetic",
    "image_layout",
    "output_layout",
    "parse",
    "place_of_rank",
    "rank_of_place",
    "rank_of_stage",
    "split_blocks",
    "stage_layers",
    "stages_of_rank",
    "token_layout",
    "validate",
]
