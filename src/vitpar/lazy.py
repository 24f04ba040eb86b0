"""Names of a package that are loaded when they are first used, so that importing the package does not import torch."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def lazy_names(package: str, modules: Mapping[str, tuple[str, ...]]) -> Callable[[str], Any]:
    """Return the function ``__getattr__`` of `package` (PEP 562).

    modules: names that the package exports, by the module that defines them.
    """
    places = {name: module for module, names in modules.items() for name in names}

    def load(name: str) -> Any:
        if name not in places:
            raise AttributeError(f"module '{package}' has no attribute '{name}'")
        value = getattr(importlib.import_module(places[name]), name)
        setattr(sys.modules[package], name, value)  # the next use finds it without this function
        return value

    return load
