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
are read too. Galvatron's files (``vitpar.strategy.galvatron``) are read and checked by the same functions.
"""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import starmap
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, Field, StrictInt, StrictStr, ValidationError

from vitpar import io
from vitpar.errors import StrategyError
from vitpar.limits import MAX_JSON_BYTES, MAX_QUOTED_CHARS
from vitpar.strategy.grammar import parse
from vitpar.strategy.layer import Axis, Strategy
from vitpar.strategy.plan import Plan
from vitpar.text import nearest, shown

FORMAT = 2

# Descriptions become part of error messages ("give a whole number").
_Whole = Annotated[int, Field(strict=True, description="a whole number")]
_WholeOrNull = Annotated[int | None, Field(strict=True, description="a whole number or null")]
_Text = Annotated[str, Field(strict=True, description="text")]


class _PlanRecord(BaseModel):
    """Schema of a plan's JSON."""

    vitpar_plan: _Whole
    strategy: _Text
    schedule: _Text = ""
    virtual_stages: _Whole = 1
    microbatches: _WholeOrNull = None
    microbatch_size: _WholeOrNull = None
    split: StrictStr | Annotated[tuple[StrictInt, ...], Field(fail_fast=True)] = Field(
        "", description="text or a list of whole numbers"
    )


def plan_to_json(plan: Plan) -> dict[str, Any]:
    """Return the plan as a dict of JSON values, with all keys."""
    split = plan.split if isinstance(plan.split, str) else list(plan.split)
    special = {"vitpar_plan": FORMAT, "strategy": str(plan), "split": split}
    return {key: special[key] if key in special else getattr(plan, key) for key in _PlanRecord.model_fields}


def plan_from_json(data: dict[str, Any]) -> Plan:
    """Return the plan that `data` describes. Raises StrategyError naming the key that is missing, unknown or wrong."""
    if isinstance(data, dict) and "tp_sizes_enc" in data:
        raise StrategyError("this is a Galvatron strategy file: convert it with `vitpar galvatron import`")
    if isinstance(data, dict) and data.get("vitpar_plan") == 1:
        data = _from_format_1(data)
    said = checked(_PlanRecord, data, "the plan")
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
    except (KeyError, TypeError, ValueError, AttributeError):
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


# Files of any schema


R = TypeVar("R", bound=BaseModel)


def checked(schema: type[R], data: object, where: str) -> R:
    """Return `data` as a record of `schema`.

    schema: model whose field descriptions complete the messages
    where: name of the data in messages

    Raises StrategyError naming the first key that is unknown, else wrong, else missing.
    """
    keys = schema.model_fields
    if not isinstance(data, dict):
        raise StrategyError(f"{where} is {_as_json(data)}: give an object with the keys {', '.join(keys)}")
    if (unknown := next((key for key in data if key not in keys), None)) is not None:
        raise StrategyError(
            f"unknown key '{shown(unknown)}' in {where}: keys are {', '.join(keys)}{nearest(str(unknown), keys)}"
        )
    try:
        return schema.model_validate(data)
    except ValidationError as error:
        wrong = error.errors(include_url=False, include_context=False, include_input=False)
    key = str(min(wrong, key=lambda one: one["type"] == "missing")["loc"][0])  # wrong values before missing keys
    if key not in data:
        raise StrategyError(f"{where} has no key '{key}': add it, the value is {keys[key].description}")
    raise StrategyError(f"'{key}' in {where} is {_as_json(data[key])}: give {keys[key].description}")


def read_json(path: io.PathLike) -> Any:
    """Return the content of the JSON file `path`.

    Raises StrategyError naming the file if it cannot be read or is not JSON.
    """
    try:
        return io.parse_json(io.read_bytes(path, MAX_JSON_BYTES), _unique_keys)
    except StrategyError as error:
        raise StrategyError(f"{shown(path)}: {error}") from None
    except OSError as error:
        raise StrategyError(f"cannot read the plan {shown(path)}: {error.strerror}") from None
    except ValueError as error:  # not UTF-8, or not JSON
        raise StrategyError(f"{shown(path)} is not JSON: {shown(error)}") from None


def write_text(path: io.PathLike, text: str) -> None:
    """Write `text` to `path` atomically. Raises StrategyError if the file cannot be written."""
    try:
        io.write_text(path, text)
    except OSError as error:
        raise StrategyError(f"cannot write the plan {shown(path)}: {error.strerror}") from None


def _as_json(value: object) -> str:
    """Return the value as JSON, shortened for a message."""
    text = ""
    # The value may be huge: stop encoding once there is enough for a message.
    for piece in json.JSONEncoder(default=str).iterencode(value):
        text += piece
        if len(text) > MAX_QUOTED_CHARS:
            break
    return shown(text)


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the pairs of a JSON object as a dict. Raises StrategyError for a duplicate key, which json accepts."""
    record: dict[str, Any] = {}
    for key, value in pairs:
        if key in record:
            raise StrategyError(f"key '{shown(key)}' is repeated: give it once")
        record[key] = value
    return record
