"""Strategies: the language, the plan objects, their JSON, and what follows from a plan by arithmetic alone.

Pure Python; importing it does not import torch.
"""

from vitpar.strategy.batch import BatchArithmetic, batch_arithmetic
from vitpar.strategy.grammar import parse
from vitpar.strategy.layer import CHECKPOINT_POLICIES, ROLES, TENSOR_MODES, Axis, Role, Strategy
from vitpar.strategy.layout import Part, image_layout, logit_layout, token_layout
from vitpar.strategy.plan import SPLITS, Plan
from vitpar.strategy.ranks import coordinates, place_of_rank, rank_grid, rank_of_place
from vitpar.strategy.schedules import SCHEDULES, Schedule
from vitpar.strategy.serialize import plan_from_json, plan_text, plan_to_json, read_plan, write_plan
from vitpar.strategy.stages import rank_of_stage, split_blocks, stages_of_rank
from vitpar.strategy.validate import ModelShape, validate

__all__ = [
    "CHECKPOINT_POLICIES",
    "ROLES",
    "SCHEDULES",
    "SPLITS",
    "TENSOR_MODES",
    "Axis",
    "BatchArithmetic",
    "ModelShape",
    "Part",
    "Plan",
    "Role",
    "Schedule",
    "Strategy",
    "batch_arithmetic",
    "coordinates",
    "image_layout",
    "logit_layout",
    "parse",
    "place_of_rank",
    "plan_from_json",
    "plan_text",
    "plan_to_json",
    "rank_grid",
    "rank_of_place",
    "rank_of_stage",
    "read_plan",
    "split_blocks",
    "stages_of_rank",
    "token_layout",
    "validate",
    "write_plan",
]
