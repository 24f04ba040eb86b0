"""Names with arguments in recipes, such as `step(every=30 epochs)`."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any, TypeVar, get_args, get_type_hints

from vitpar.intervals import Interval
from vitpar.text import nearest, shown

_CALL = re.compile(r"\s*([a-z_]+)\s*(?:\(([^()]{0,400})\))?\s*", re.IGNORECASE)
_ARGUMENT = re.compile(r"\s*([a-z_]+)\s*=\s*(\[[^\[\]]*\]|[^,=\[\]]+?)\s*(?:,|$)", re.IGNORECASE)


_T = TypeVar("_T")


def parse_call(text: str, classes: Mapping[str, type[_T]], noun: str, example: str) -> _T:
    """Return the object that text such as `wsd(decay=10 %, form=linear)` describes.

    classes: dataclasses by name, whose fields are the arguments.
    noun: word for one of them, for messages. example: of such a text.

    Raises ValueError.
    """
    found = _CALL.fullmatch(text)
    if found is None:
        raise ValueError(f"'{shown(text)}' is no {noun}: give a name with arguments, as in {example}")
    name, inner = found[1], (found[2] or "").strip()
    if name not in classes:
        raise ValueError(f"'{shown(name)}' is no {noun}{nearest(name, classes)}: give {', '.join(classes)}")
    called: Any = classes[name]
    values, end = dict[str, Any](), 0
    kinds = {field.name: get_type_hints(called)[field.name] for field in fields(called)}
    for match in _ARGUMENT.finditer(inner):
        key = match[1]
        if match.start() != end or key not in kinds or key in values:
            break
        values[key], end = _value(f"{name}'s {key}", kinds[key], match[2]), match.end()
    if end != len(inner):
        takes = f"takes {', '.join(kinds)}" if kinds else "takes no arguments"
        raise ValueError(f"'{shown(inner[end:])}' is not understood in '{shown(text)}': {name} {takes}, as in a=1, b=2")
    if missing := [one.name for one in fields(called) if one.default is MISSING and one.name not in values]:
        given = "[30 epochs, 60 epochs]" if kinds[missing[0]] == tuple[Interval, ...] else "30 epochs"
        raise ValueError(f"{name} needs {missing[0]}: write {name}({missing[0]}={given})")
    made: _T = called(**values)
    return made


def _value(what: str, kind: Any, text: str) -> Any:
    """Return an argument."""
    if get_args(kind) and all(isinstance(choice, str) for choice in get_args(kind)):
        if text not in get_args(kind):
            raise ValueError(f"{what} is '{shown(text)}': give one of {', '.join(get_args(kind))}")
        return text
    if kind == tuple[Interval, ...]:
        if not (text.startswith("[") and text[1:-1].strip()):
            raise ValueError(f"{what} is '{shown(text)}', which is no list: write [30 epochs, 60 epochs]")
        return tuple(_interval(what, one) for one in text[1:-1].split(","))
    if kind is int or kind is float:
        try:
            number = kind(text)
        except ValueError:
            number = math.nan
        if not 0 < number <= 1000:
            whole = "whole " if kind is int else ""
            raise ValueError(f"{what} is '{shown(text)}': give a {whole}number above 0, of at most 1000")
        return number
    return _interval(what, text)


def _interval(what: str, text: str) -> Interval:
    """Return an argument that is an interval."""
    try:
        return Interval.of(text.strip()).in_steps()
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from None
