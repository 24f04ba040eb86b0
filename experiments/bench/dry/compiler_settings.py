"""Settings of torch's compiler by name, as ``triton.mix_order_reduction=false``."""

from __future__ import annotations

import ast
from collections.abc import Iterable

import torch._inductor.config as settings

from vitpar.errors import UserError
from vitpar.text import nearest, shown

WORDS = {"true": True, "false": False, "none": None}


def change(assignments: Iterable[str]) -> None:
    """Change settings of ``torch._inductor.config``. Raises UserError for a name or value that does not exist.

    assignments: KEY=VALUE pairs.
    """
    known = settings.get_config_copy()
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not equals:
            raise UserError(f"--set '{shown(assignment)}' has no value: use KEY=VALUE")
        if key not in known:
            raise UserError(f"torch's compiler has no setting '{shown(key)}'{nearest(key, sorted(known))}: use another")
        try:
            value = WORDS[text.lower()] if text.lower() in WORDS else ast.literal_eval(text)
        except (ValueError, SyntaxError):
            value = text
        if known[key] is not None and type(value) is not type(known[key]):
            raise UserError(f"--set {key} is {shown(text)}: use a {type(known[key]).__name__}")
        *path, name = key.split(".")
        place = settings
        for part in path:
            place = getattr(place, part)
        setattr(place, name, value)
