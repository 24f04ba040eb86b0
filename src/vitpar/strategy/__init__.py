"""Strategies: the language, the plan objects, their JSON, and what follows from a plan by arithmetic alone.

Pure Python; importing it does not import torch.
"""

from vitpar.strategy.batch import BatchArithmetic, batch_arithmetic
from vitpar.strategy.grammar import format_plan, parse
from vitpar.strategy.plan import CHECKPOINT_POLICIES, ROLES, SCHEDULES, SPLITS, Axis, Plan, Role, Strategy
from vitpar.strategy.ranks import coordinates, data_index, rank_grid
from vitpar.strategy.serialize import plan_from_json, plan_to_json, read_plan, write_plan
from vitpar.strategy.stages import split_blocks, stages_of_rank
from vitpar.strategy.validate import ModelShape, validate

__all__ = [
    "CHECKPOINT_POLICIES",
    "ROLES",
    "SCHEDULES",
    "SPLITS",
    "Axis",
    "BatchArithmetic",
    "ModelShape",
    "Plan",
    "Role",
    "Strategy",
    "batch_arithmetic",
    "coordinates",
    "data_index",
    "format_plan",
    "parse",
    "plan_from_json",
    "plan_to_json",
    "rank_grid",
    "read_plan",
    "split_blocks",
    "stages_of_rank",
    "validate",
    "write_plan",
]
