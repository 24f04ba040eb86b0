"""Plans as JSON (`plan.json`): the strategy string and the settings besides it. Unknown keys are refused.

    {
      "vitpar_plan": 2,                 format of this file
      "strategy": "pp2xtp2xdp2",
      "schedule": "1f1b",
      "virtual_stages": 1,
      "microbatches": 4,                null = not given
      "microbatch_size": null,          null = not given
      "split": "even"                   or "balanced", or the blocks of each stage as in [6, 6]
    }

Keys other than the first two default to those of `Plan`. Files of format 1, with an object for each group of layers,
are read too.
"""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import starmap
from typing import Any

from pydantic import StrictInt, StrictStr

from vitpar import io
from vitpar.errors import StrategyError
from vitpar.records import Record, first_wrong
from vitpar.strategy.grammar import parse
from vitpar.strategy.layer import Axis, Strategy
from vitpar.strategy.plan import Plan
from vitpar.text import shown

FORMAT = 2


class _PlanRecord(Record):
    """Schema of a plan's JSON."""

    vitpar_plan: StrictInt
    strategy: StrictStr
    schedule: StrictStr = ""
    virtual_stages: StrictInt = 1
    microbatches: StrictInt | None = None
    microbatch_size: StrictInt | None = None
    split: StrictStr | tuple[StrictInt, ...] = ""


def plan_to_json(plan: Plan) -> dict[str, Any]:
    """Return the plan as a dict of JSON values, with all keys."""
    split = plan.split if isinstance(plan.split, str) else list(plan.split)
    special = {"vitpar_plan": FORMAT, "strategy": str(plan), "split": split}
    return {key: special[key] if key in special else getattr(plan, key) for key in _PlanRecord.model_fields}


def plan_from_json(data: dict[str, Any]) -> Plan:
    """Return the plan that `data` describes. Raises StrategyError naming the key that is missing, unknown or wrong."""
    if "tp_sizes_enc" in data:
        raise StrategyError("this is a Galvatron strategy file: convert it with `vitpar galvatron import`")
    if data.get("vitpar_plan") == 1:
        data = _from_format_1(data)
    try:
        said = _PlanRecord.model_validate(data)
    except ValueError as error:
        raise StrategyError(f"the plan is wrong: {first_wrong(error)}: correct it") from None
    if said.vitpar_plan != FORMAT:
        raise StrategyError(f"'vitpar_plan' is {shown(said.vitpar_plan)}: this vitpar reads plans of format {FORMAT}")
    fields = said.model_dump(exclude={"vitpar_plan", "strategy"}, exclude_unset=True)
    return replace(parse(said.strategy), **fields)


def _from_format_1(data: dict[str, Any]) -> dict[str, Any]:
    """Return a plan in which each group of layers is an object with the fields of `Strategy` as one of `FORMAT`."""
    others = {key: value for key, value in data.items() if key not in ("layers", "pp", "pp_index")}
    try:
        layers = []
        for group in data["layers"]:
            flags = {key: value for key, value in group.items() if key not in ("layers", "axes")}
            layers.append((group["layers"], Strategy(tuple(starmap(Axis, group["axes"])), **flags)))
        plan = Plan(tuple(layers), data.get("pp", 1), data.get("pp_index", 0))
    except (AssertionError, AttributeError, KeyError, TypeError, ValueError):
        raise StrategyError("the layers of this plan of format 1 cannot be read: name its strategy instead") from None
    return {**others, "vitpar_plan": FORMAT, "strategy": str(plan)}


def read_plan(path: io.PathLike) -> Plan:
    """Return the plan in the file `path`. Raises StrategyError naming the file if it is missing or not a plan."""
    data = read_json(path)
    try:
        return plan_from_json(data)
    except StrategyError as error:
        raise StrategyError(f"{shown(path)}: {error}") from None


def write_plan(path: io.PathLike, plan: Plan) -> None:
    """Write the plan to `path` atomically, one key per line.

    Raises StrategyError if the file cannot be written.
    """
    write_text(path, plan_text(plan))


def plan_text(plan: Plan) -> str:
    """Return the plan as the text of its JSON file, one key per line."""
    lines = (f'  "{key}": {json.dumps(value)}' for key, value in plan_to_json(plan).items())
    return "{\n" + ",\n".join(lines) + "\n}\n"


def read_json(path: io.PathLike) -> dict[str, Any]:
    """Return the JSON object in the file `path`. Raises StrategyError naming the file if there is none."""
    try:
        data = io.read_json(path)
    except OSError as error:
        raise StrategyError(f"cannot read the plan {shown(path)}: {error.strerror}") from None
    except ValueError as error:  # not UTF-8, or not JSON
        raise StrategyError(f"{shown(path)} is not JSON: {shown(error)}") from None
    if not isinstance(data, dict):
        raise StrategyError(f"{shown(path)} is not a plan: it has no JSON object")
    return data


def write_text(path: io.PathLike, text: str) -> None:
    """Write `text` to `path` atomically. Raises StrategyError if the file cannot be written."""
    try:
        io.write_text(path, text)
    except OSError as error:
        raise StrategyError(f"cannot write the plan {shown(path)}: {error.strerror}") from None
