"""A plan as JSON (`plan.json`). Every key is read; a key that is not known is refused.

    {
      "vitpar_plan": 1,                   format of this file
      "pp": 2,                            pipeline degree, null = open
      "pp_index": 0,                      axes that are outer to pp in the rank order
      "layers": [
        {"layers": "*",                 or "stem", "head", "3", "0-11"
         "axes": [["tp", 2], ["dp", 2]], outermost first
         "tensor_mode": "1d",           or "2d", "2.5d", "3d"
         "depth": null,                 of 2.5d, null = the least
         "sequence_parallel": false,
         "zero": 0,                     or 1, 2
         "checkpoint": null,            or "full", "selective"
         "offload": false}
      ],
      "schedule": "1f1b",
      "virtual_stages": 1,
      "microbatches": 4,                  null = not said
      "microbatch_size": null,            null = not said
      "split": "even"                     or "balanced", or the blocks of each stage as in [6, 6]
    }

"vitpar_plan" and "layers" must be there, and in a layer "layers" and "axes"; any other key left out takes the default
of `Plan` or `Strategy`.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from vitpar.errors import StrategyError, shown
from vitpar.limits import MAX_BLOCKS
from vitpar.strategy.json_file import Fits, Keys, check_record, read_json, write_text
from vitpar.strategy.layer import ROLES, Axis, Strategy
from vitpar.strategy.plan import Plan

FORMAT = 1


def plan_to_json(plan: Plan) -> dict[str, Any]:
    """The plan as a dict of JSON values, all keys present."""
    return {
        "vitpar_plan": FORMAT,
        "pp": plan.pp,
        "pp_index": plan.pp_index,
        "layers": [
            {
                "layers": selector,
                "axes": [[axis.role, axis.degree] for axis in strategy.axes],
                **{key: getattr(strategy, key) for key in _FLAG_KEYS},
            }
            for selector, strategy in plan.layers
        ],
        "schedule": plan.schedule,
        "virtual_stages": plan.virtual_stages,
        "microbatches": plan.microbatches,
        "microbatch_size": plan.microbatch_size,
        "split": plan.split if isinstance(plan.split, str) else list(plan.split),
    }


def plan_from_json(data: dict[str, Any]) -> Plan:
    """The plan that `data` says. Raises StrategyError naming the key that is missing, unknown or wrong."""
    if isinstance(data, dict) and "tp_sizes_enc" in data:
        raise StrategyError("this is a strategy of Galvatron's: turn it into a plan with 'vitpar galvatron import'")
    check_record(data, _PLAN_KEYS, required=("vitpar_plan", "layers"), where="the plan")
    if data["vitpar_plan"] != FORMAT:
        raise StrategyError(
            f"'vitpar_plan' is {shown(data['vitpar_plan'])}: this vitpar reads plans of format {FORMAT}"
        )
    fields = {key: value for key, value in data.items() if key not in ("vitpar_plan", "layers")}
    if isinstance(fields.get("split"), list):
        fields["split"] = tuple(fields["split"])
    layers = tuple(_layer_from_json(record, f"layers[{index}]") for index, record in enumerate(data["layers"]))
    return Plan(layers=layers, **fields)


def read_plan(path: str | os.PathLike[str]) -> Plan:
    """The plan in the file `path`. Raises StrategyError, naming the file, when it is missing or not a plan."""
    data = read_json(path)
    try:
        return plan_from_json(data)
    except StrategyError as error:
        raise StrategyError(f"{shown(path)}: {error}") from None


def write_plan(path: str | os.PathLike[str], plan: Plan) -> None:
    """Write the plan to `path`, one key and one layer a line. A reader sees the old file or the whole new one.

    Raises StrategyError when the file cannot be written.
    """
    write_text(path, plan_text(plan))


def plan_text(plan: Plan) -> str:
    """The plan as its JSON file has it, one key and one layer a line."""
    data = plan_to_json(plan)
    layers = ",\n".join(f"    {json.dumps(record)}" for record in data["layers"])
    values = {key: json.dumps(value) for key, value in data.items()} | {"layers": f"[\n{layers}\n  ]"}
    return "{\n" + ",\n".join(f'  "{key}": {value}' for key, value in values.items()) + "\n}\n"


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_bool(value: object) -> bool:
    return isinstance(value, bool)


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_axis(value: object) -> bool:
    return isinstance(value, list) and len(value) == 2 and _is_text(value[0]) and _or_null(_is_int)(value[1])


def _or_null(fits: Fits) -> Fits:
    return lambda value: value is None or fits(value)


def _list_of(fits: Fits, most: int = sys.maxsize) -> Fits:
    return lambda value: isinstance(value, list) and len(value) <= most and all(map(fits, value))


_GROUPS = MAX_BLOCKS + len(("stem", "head", "*"))
_PLAN_KEYS: Keys = {
    "vitpar_plan": (_is_int, "a whole number"),
    "pp": (_or_null(_is_int), "a whole number or null"),
    "pp_index": (_is_int, "a whole number"),
    "layers": (
        _list_of(lambda record: isinstance(record, dict), most=_GROUPS),
        f"a list of at most {_GROUPS:,} objects",
    ),
    "schedule": (_is_text, "text"),
    "virtual_stages": (_is_int, "a whole number"),
    "microbatches": (_or_null(_is_int), "a whole number or null"),
    "microbatch_size": (_or_null(_is_int), "a whole number or null"),
    "split": (lambda value: _is_text(value) or _list_of(_is_int)(value), "text or a list of whole numbers"),
}
_LAYER_KEYS: Keys = {
    "layers": (_is_text, "text"),
    "axes": (_list_of(_is_axis, most=len(ROLES)), 'a list of [role, degree] pairs, as in [["tp", 2]]'),
}
_FLAG_KEYS: Keys = {
    "tensor_mode": (_is_text, "text"),
    "depth": (_or_null(_is_int), "a whole number or null"),
    "sequence_parallel": (_is_bool, "true or false"),
    "zero": (_is_int, "a whole number"),
    "checkpoint": (_or_null(_is_text), "text or null"),
    "offload": (_is_bool, "true or false"),
}


def _layer_from_json(record: dict[str, Any], where: str) -> tuple[str, Strategy]:
    check_record(record, _LAYER_KEYS | _FLAG_KEYS, required=("layers", "axes"), where=where)
    try:
        axes = tuple(Axis(role, degree) for role, degree in record["axes"])
        return record["layers"], Strategy(axes, **{key: record[key] for key in _FLAG_KEYS if key in record})
    except StrategyError as error:
        raise StrategyError(f"{where}: {error}") from None
