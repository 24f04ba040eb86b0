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
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from vitpar.errors import StrategyError, nearest
from vitpar.strategy.layer import Axis, Strategy
from vitpar.strategy.plan import Plan

FORMAT = 1
_Fits = Callable[[object], bool]
_Keys = dict[str, tuple[_Fits, str]]  # key -> does the value fit, and what would


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
    _check_record(data, _PLAN_KEYS, required=("vitpar_plan", "layers"), where="the plan")
    if data["vitpar_plan"] != FORMAT:
        raise StrategyError(f"'vitpar_plan' is {data['vitpar_plan']}: this vitpar reads plans of format {FORMAT}")
    fields = {key: value for key, value in data.items() if key not in ("vitpar_plan", "layers")}
    if isinstance(fields.get("split"), list):
        fields["split"] = tuple(fields["split"])
    layers = tuple(_layer_from_json(record, f"layers[{index}]") for index, record in enumerate(data["layers"]))
    return Plan(layers=layers, **fields)


def read_plan(path: str | os.PathLike[str]) -> Plan:
    """The plan in the file `path`. Raises StrategyError, naming the file, when it is missing or not a plan."""
    try:
        return plan_from_json(json.loads(Path(path).read_text(encoding="utf-8"), object_pairs_hook=_unique_keys))
    except StrategyError as error:
        raise StrategyError(f"{path}: {error}") from None
    except OSError as error:
        raise StrategyError(f"cannot read the plan {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # not UTF-8, or not JSON
        raise StrategyError(f"{path} is not JSON: {error}") from None


def write_plan(path: str | os.PathLike[str], plan: Plan) -> None:
    """Write the plan to `path`, one key and one layer a line. A reader sees the old file or the whole new one.

    Raises StrategyError when the file cannot be written.
    """
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        temporary.write_text(_to_text(plan), encoding="utf-8")
        os.replace(temporary, target)
    except OSError as error:
        raise StrategyError(f"cannot write the plan {path}: {error.strerror}") from None
    finally:
        with suppress(OSError):  # already renamed, or never made
            temporary.unlink()


def _to_text(plan: Plan) -> str:
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


def _or_null(fits: _Fits) -> _Fits:
    return lambda value: value is None or fits(value)


def _list_of(fits: _Fits) -> _Fits:
    return lambda value: isinstance(value, list) and all(map(fits, value))


_PLAN_KEYS: _Keys = {
    "vitpar_plan": (_is_int, "a whole number"),
    "pp": (_or_null(_is_int), "a whole number or null"),
    "pp_index": (_is_int, "a whole number"),
    "layers": (_list_of(lambda record: isinstance(record, dict)), "a list of objects"),
    "schedule": (_is_text, "text"),
    "virtual_stages": (_is_int, "a whole number"),
    "microbatches": (_or_null(_is_int), "a whole number or null"),
    "microbatch_size": (_or_null(_is_int), "a whole number or null"),
    "split": (lambda value: _is_text(value) or _list_of(_is_int)(value), "text or a list of whole numbers"),
}
_LAYER_KEYS: _Keys = {
    "layers": (_is_text, "text"),
    "axes": (_list_of(_is_axis), 'a list of [role, degree] pairs, as in [["tp", 2]]'),
}
_FLAG_KEYS: _Keys = {
    "tensor_mode": (_is_text, "text"),
    "depth": (_or_null(_is_int), "a whole number or null"),
    "sequence_parallel": (_is_bool, "true or false"),
    "zero": (_is_int, "a whole number"),
    "checkpoint": (_or_null(_is_text), "text or null"),
    "offload": (_is_bool, "true or false"),
}


def _layer_from_json(record: dict[str, Any], where: str) -> tuple[str, Strategy]:
    _check_record(record, _LAYER_KEYS | _FLAG_KEYS, required=("layers", "axes"), where=where)
    try:
        axes = tuple(Axis(role, degree) for role, degree in record["axes"])
        return record["layers"], Strategy(axes, **{key: record[key] for key in _FLAG_KEYS if key in record})
    except StrategyError as error:
        raise StrategyError(f"{where}: {error}") from None


def _check_record(record: object, keys: _Keys, required: Iterable[str], where: str) -> None:
    """Refuse what is not a dict with these keys and types of values."""
    if not isinstance(record, dict):
        raise StrategyError(f"{where} is {_shown(record)}: give an object with the keys {', '.join(keys)}")
    for key, value in record.items():
        if key not in keys:
            raise StrategyError(f"unknown key '{key}' in {where}: keys are {', '.join(keys)}{nearest(str(key), keys)}")
        fits, words = keys[key]
        if not fits(value):
            raise StrategyError(f"'{key}' in {where} is {_shown(value)}: give {words}")
    for key in required:
        if key not in record:
            raise StrategyError(f"{where} has no key '{key}': add it, the value is {keys[key][1]}")


def _shown(value: object) -> str:
    """The value as JSON, cut short."""
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object as a dict; refuses a key that stands twice, where json would keep the last."""
    record = dict(pairs)
    if len(record) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise StrategyError(f"key '{twice}' stands twice: give it once")
    return record
