"""Matching of a model's classes with those of data."""

from types import SimpleNamespace
from typing import Any

import pytest

from vitpar.data.classes import match_classes

CAT, NUMBERS = ("cat", "dog", "fox"), ("0", "1", "2")
ROWS: dict[str, tuple[Any, tuple[Any, ...], str, Any, str]] = {
    # names of the model, lists of names of the data, kind, outputs, words
    "equal": (CAT, (CAT,), "same", None, ""),
    "equal identifiers": (("n1", "n2"), (("cat", "dog"), ("n1", "n2")), "same", None, ""),
    "equal names that repeat": (("crane", "crane"), (("crane", "crane"),), "same", None, ""),
    "another order": (CAT, (("fox", "cat", "dog"),), "moved", (2, 0, 1), "matched by name with the 3"),
    "some of them": (CAT, (("fox", "dog"),), "moved", (2, 1), "the 2 classes of 'here' are matched"),
    "some identifiers": (CAT, (("Katze", "Hund"), ("cat", "dog")), "moved", (0, 1), ""),
    "numbers in another order": (NUMBERS, (("2", "1", "0"),), "moved", (2, 1, 0), ""),
    "one that is unknown": (("cat", "dog"), (CAT,), "mixed", None, "'cat', 'dog' lack 'fox' of 'here'"),
    "repeated names, moved": (("crane", "crane", "cat"), (("cat", "crane", "crane"),), "mixed", None, "repeat names"),
    "nothing in common": (CAT, (("a", "b", "c", "d"),), "other", None, "those of 'here' are 'a', 'b', 'c', … (4)"),
    "no names of the model": (None, (CAT,), "unnamed", None, ""),
    "no names of the data": (CAT, (), "unnamed", None, ""),
    "numbers for names": (CAT, (NUMBERS,), "unnamed", None, ""),
    "numbers for names of the model": (NUMBERS, (("cats", "dogs"), ("cat", "dog")), "unnamed", None, ""),
}


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_classes_are_matched_by_name(row: tuple[Any, tuple[Any, ...], str, Any, str]) -> None:
    names, known, kind, outputs, words = row
    found = match_classes(names, SimpleNamespace(place="here", num_classes=3, names_of_classes=known))
    assert (found.kind, found.outputs) == (kind, outputs) and words in found.words
    assert bool(found.words) == (kind not in ("same", "unnamed"))
