"""JSON files of plans: read and written whole, their keys and types checked, every refusal naming the place."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from typing import Any

from vitpar import files
from vitpar.errors import StrategyError, nearest, shown
from vitpar.limits import MAX_PLAN_BYTES, MAX_QUOTED_CHARS

Fits = Callable[[object], bool]
Keys = dict[str, tuple[Fits, str]]
"""key -> does the value fit, and what would."""


def read_json(path: str | os.PathLike[str]) -> Any:
    """What the file `path` holds. Raises StrategyError, naming the file, when it cannot be read or is not JSON."""
    try:
        return files.parse_json(files.read_bytes(path, MAX_PLAN_BYTES), _unique_keys)
    except StrategyError as error:
        raise StrategyError(f"{shown(path)}: {error}") from None
    except OSError as error:
        raise StrategyError(f"cannot read the plan {shown(path)}: {error.strerror}") from None
    except ValueError as error:  # not UTF-8, or not JSON
        raise StrategyError(f"{shown(path)} is not JSON: {shown(error)}") from None


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write `text` to `path`. A reader sees the old file or the whole new one.

    Raises StrategyError when the file cannot be written.
    """
    try:
        files.write_text(path, text)
    except OSError as error:
        raise StrategyError(f"cannot write the plan {shown(path)}: {error.strerror}") from None


def check_record(record: object, keys: Keys, required: Iterable[str], where: str) -> None:
    """Refuse what is not a dict with these keys and types of values."""
    if not isinstance(record, dict):
        raise StrategyError(f"{where} is {_shown(record)}: give an object with the keys {', '.join(keys)}")
    for key, value in record.items():
        if key not in keys:
            raise StrategyError(
                f"unknown key '{shown(key)}' in {where}: keys are {', '.join(keys)}{nearest(str(key), keys)}"
            )
        fits, words = keys[key]
        if not fits(value):
            raise StrategyError(f"'{key}' in {where} is {_shown(value)}: give {words}")
    for key in required:
        if key not in record:
            raise StrategyError(f"{where} has no key '{key}': add it, the value is {keys[key][1]}")


def _shown(value: object) -> str:
    """The value as JSON, as far as a message quotes it."""
    text = ""
    for piece in json.JSONEncoder(default=str).iterencode(value):  # no more of it than that is made
        text += piece
        if len(text) > MAX_QUOTED_CHARS:
            break
    return shown(text)


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object as a dict; refuses a key that stands twice, where json would keep the last."""
    record: dict[str, Any] = {}
    for key, value in pairs:
        if key in record:
            raise StrategyError(f"key '{shown(key)}' stands twice: give it once")
        record[key] = value
    return record
