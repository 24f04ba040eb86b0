"""Names with arguments in recipes, such as `step(every=30 epochs)`: each name is a pydantic model of its arguments."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from vitpar.intervals import Interval
from vitpar.text import nearest, shown

_CALL = re.compile(r"\s*([a-z_]+)\s*(?:\(([^()]{0,400})\))?\s*", re.IGNORECASE)
_ARGUMENT = re.compile(r"\s*([a-z_]+)\s*=\s*(\[[^\[\]]*\]|[^,=\[\]]+?)\s*(?:,|$)", re.IGNORECASE)
Steps = Annotated[Interval, AfterValidator(Interval.in_steps)]
"""Interval whose number of steps is known."""
Number = Annotated[float, Field(gt=0, le=1000)]
Count = Annotated[int, Field(gt=0, le=1000)]


class Called(BaseModel):
    """Base of the models of arguments."""

    model_config = ConfigDict(extra="forbid", frozen=True)


T = TypeVar("T", bound=Called)


def parse_call(text: str, classes: Mapping[str, type[T]], noun: str, example: str) -> T:
    """Return the object that text such as `wsd(decay=10 %, form=linear)` describes.

    classes: models of the arguments, by name.
    noun: word for one of them, for messages. example: of such a text.

    Raises ValueError.
    """
    found = _CALL.fullmatch(text)
    if found is None:
        raise ValueError(f"'{shown(text)}' is no {noun}: give a name with arguments, as in {example}")
    name, inner = found[1], found[2] or ""
    if name not in classes:
        raise ValueError(f"'{shown(name)}' is no {noun}{nearest(name, classes)}: give {', '.join(classes)}")
    pairs, takes = _ARGUMENT.findall(inner), ", ".join(classes[name].model_fields) or "no arguments"
    values = {key: given[1:-1].split(",") if given[0] == "[" else given for key, given in pairs}
    if _ARGUMENT.sub("", inner).strip() or len(values) < len(pairs):
        raise ValueError(f"'{shown(inner)}' is not understood in '{shown(text)}': {name} takes {takes}, as in a=1, b=2")
    try:
        return classes[name].model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        said = str(first["ctx"]["error"]) if first["type"] == "value_error" else first["msg"].lower()
        raise ValueError(f"{name}'s {first['loc'][0]}: {said} (it takes {takes}, as in {example})") from None
