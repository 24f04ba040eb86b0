"""Check of the names of classes, and matching the classes of saved weights with those of data by name.

Numbers of classes mean something only together with names: two data sets with the same classes may number them in
another order. Weights and checkpoints keep the names of the data they were trained on (classes.json).
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from vitpar.errors import DataError
from vitpar.io import decode_utf8, is_utf8
from vitpar.limits import MAX_CLASSES
from vitpar.text import count, shown

if TYPE_CHECKING:
    from vitpar.data.stream.stream_set import ImageSet

_HIDDEN = ("Cc", "Zl", "Zp")
"""Unicode's categories of characters that a name may not have: controls, line and paragraph separators."""


def check_class_names(names: Sequence[str]) -> None:
    """Raise DataError unless each of `names`, in label order, stands for one class and can be written and seen.

    Names are compared without surrounding blanks, and as Unicode's normal form C: é is one character or two.
    """
    if len(names) > MAX_CLASSES:
        raise DataError(f"there are {len(names):,} classes: the limit is {MAX_CLASSES:,}")
    known = dict[str, str]()
    for number, name in enumerate(names):
        if not name.isprintable():
            if not is_utf8(name):
                raise DataError(f"the class name {_escaped(name)} is not UTF-8: rename it")
            if any(unicodedata.category(char) in _HIDDEN or char == "\ufeff" for char in name):
                raise DataError(f"the class name {_escaped(name)} has a control character or a mark: remove it")
        plain = unicodedata.normalize("NFC", name).strip()
        if not plain:
            raise DataError(f"class {number} has no name: give it one, or remove the blank line")
        if known.setdefault(plain, name) is not name:
            same = known[plain]
            if same == name:
                raise DataError(f"two classes are called '{shown(name)}': rename or merge them")
            raise DataError(f"the class names {_escaped(same)} and {_escaped(name)} look the same: use one spelling")


def class_names(data: bytes) -> list[str]:
    """Return the names of classes in a text file, one a line, without surrounding blanks.

    Blank lines at the end do not count. Raises ValueError as `decode_utf8` does.
    """
    return [line.strip() for line in decode_utf8(data).rstrip().split("\n")]


def _escaped(text: str) -> str:
    return shown(ascii(text))


@dataclass(frozen=True)
class ClassMatch:
    """Relation of a model's classes to those of data."""

    kind: Literal["same", "moved", "unnamed", "other", "mixed"]
    """How they relate:

    same: equal names in the same order.
    moved: the model has every class of the data, under another number or among more classes.
    unnamed: one side has no names, or numbers for names.
    other: the two have no name in common.
    mixed: they share some names, but the data have classes that the model lacks.
    """
    outputs: tuple[int, ...] | None = None
    """Number in the model of each class of the data, if `moved`."""
    words: str = ""
    """How the names differ, for messages; empty if they do not."""


def match_classes(names: Sequence[str] | None, data: ImageSet) -> ClassMatch:
    """Return how the classes `names` of a model, in the order of its outputs, relate to those of `data`.

    names: None if they are unknown.
    """
    if names is None or not data.names_of_classes:
        return ClassMatch("unnamed")
    names, place = tuple(names), {name: number for number, name in enumerate(names)}
    if names in data.names_of_classes:
        return ClassMatch("same")
    unique = len(place) == len(names)
    for known in data.names_of_classes:
        if unique and len({*known}) == len(known) and place.keys() >= {*known}:
            words = (
                f"the {count(len(known), 'class')} of '{data.place}' are matched by name with the {len(names):,} of "
                "the weights"
            )
            return ClassMatch("moved", tuple(place[name] for name in known), words)
    known = max(data.names_of_classes, key=lambda known: len(place.keys() & {*known}))
    missing = [name for name in known if name not in place]
    if len(missing) < len(known):
        what = f"lack {_listed(missing)} of" if missing else "repeat names, in another order than"
        return ClassMatch("mixed", words=f"the weights' classes {_listed(names)} {what} '{data.place}'")
    if any(map(_numbered, (names, *data.names_of_classes))):
        return ClassMatch("unnamed")
    return ClassMatch(
        "other", words=f"the weights' classes are {_listed(names)}, those of '{data.place}' are {_listed(known)}"
    )


def _numbered(names: Sequence[str]) -> bool:
    """Return whether names are only the numbers of the classes, as of shards that were labelled with numbers."""
    return all(name == str(number) for number, name in enumerate(names))


def _listed(names: Sequence[str], most: int = 3) -> str:
    quoted = ", ".join(f"'{shown(name)}'" for name in names[:most])
    return f"{quoted}, … ({len(names):,})" if len(names) > most else quoted
