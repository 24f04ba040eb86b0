"""Names that changed before version 0.1.0: settings, model fields, layers, parameters. Errors give the present ones."""

from __future__ import annotations

import re
from collections.abc import Iterable

FORMER_NAMES = {
    "model.heads": "model.num_heads",
    "model.hidden": "model.mlp_hidden_dim",
    "model.registers": "model.num_reg_tokens",
    "model.width": "model.embed_dim",
    "parallel.otherwise": "parallel.fallback_meshes",
}
"""Present key of a recipe by its former key. Fields of ``ModelConfig`` are the keys of the section ``model``."""

FORMER_LAYERS = {"stem": "embed"}
"""Present name of a layer by its former name, as plans use it."""

_PARAMETERS = (
    (r"\bstem\.proj\.", "embed.patch_embed.proj.", r"\bembed\.patch_embed\.proj\.", "stem.proj."),
    (r"\bstem\.", "embed.", r"\bembed\.", "stem."),
    (r"\.gamma([12])$", r".ls\1.gamma", r"\.ls([12])\.gamma$", r".gamma\1"),
)
"""Pattern of a former parameter name and its replacement; pattern of the present name and its replacement."""


def present_field(field: str) -> str | None:
    """Return the present name of a former field of ``ModelConfig``, None if it never was one."""
    key = FORMER_NAMES.get(f"model.{field}")
    return None if key is None else key.removeprefix("model.")


def present_parameter(name: str) -> str:
    """Return the present name of a parameter with a former name, else `name`."""
    return _first(name, ((former, present) for former, present, _, _ in _PARAMETERS))


def former_parameter(name: str) -> str:
    """Return the name that a parameter had when the random numbers of its initial value were fixed."""
    return _first(name, ((present, former) for _, _, present, former in _PARAMETERS))


def _first(name: str, rules: Iterable[tuple[str, str]]) -> str:
    for pattern, replacement in rules:
        changed, times = re.subn(pattern, replacement, name, count=1)
        if times:
            return changed
    return name
