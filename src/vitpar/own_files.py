"""Classes from Python files of the user, which are named as FILE.py:NAME and run once."""

import importlib.util
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import TypeVar

from vitpar.errors import UserError
from vitpar.text import nearest, shown

T = TypeVar("T")
LOADED: dict[Path, ModuleType] = {}
"""Modules of the files that were run, by their paths."""
NAMED: list[tuple[str, str]] = []
"""Loaded here: model or task, and FILE.py:NAME. Processes that unpickle its objects load it first."""


def load_class(text: str, base: type[T], what: str, error: type[UserError], derive_from: str) -> tuple[type[T], str]:
    """Run the file of ``FILE.py:NAME`` unless it was, and return its class NAME and a name without the folder.

    base: class that it has to derive from, a dataclass.
    what: name of such a thing for messages, such as `model`.
    derive_from: name of the class that messages recommend to derive from.
    error: raised if the file cannot be run or has no such class.
    """
    file, _, attribute = text.rpartition(":")
    path = Path(file)
    if not path.is_file():
        raise error(
            f"there is no file '{shown(file)}': name the file of your {what}, as in --{what} my_{what}.py:{derive_from}"
        )
    module = LOADED.get(path.resolve()) or _run(path, error)
    cls: type[T] | None = getattr(module, attribute, None)
    if not (isinstance(cls, type) and issubclass(cls, base) and "__dataclass_fields__" in vars(cls)):
        known = [
            name
            for name, value in vars(module).items()
            if isinstance(value, type) and issubclass(value, base) and value.__module__ == module.__name__
        ]
        raise error(
            f"'{shown(file)}' has no {what} called '{shown(attribute)}'{nearest(attribute, known)}: name a dataclass "
            f"that derives from vitpar.{derive_from}{', such as ' + known[0] if known else ''}"
        )
    NAMED.append((what, text))
    return cls, f"{path.name}:{attribute}"


def _run(path: Path, refusal: type[UserError]) -> ModuleType:
    """Return the module that `path` defines."""
    name = f"vitpar_own_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise refusal(f"'{shown(path)}' is not a Python file: name one that ends in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look up their module
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # whatever the user's code raises
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename) == path]
        place = f" in line {lines[-1]}" if lines else ""
        raise refusal(f"'{shown(path)}' fails{place}: {type(error).__name__}: {shown(error)}") from error
    LOADED[path.resolve()] = module
    return module
