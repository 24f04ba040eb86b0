"""Layer selectors: `embed`, `head`, `3`, `0-11`, a name such as `stage2`, or `*`.

In a plan's groups `*` stands for all layers that no other group names, in a list of layers for all blocks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from vitpar.errors import StrategyError
from vitpar.limits import MAX_BLOCKS
from vitpar.strategy.layer import Strategy
from vitpar.text import count, nearest, shown

Groups = tuple[tuple[str, Strategy], ...]
"""(selector, strategy) pairs."""
_BLOCKS = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")
_NAME = re.compile(r"[a-z][a-z_]{0,30}[0-9]{0,4}")
WORDS = ("embed", "head", "*")
"""Selectors that are neither blocks nor names of blocks."""


def blocks_of(selector: str) -> range | None:
    """Return the blocks whose numbers `selector` gives; None for embed, head, * and names of groups of blocks.

    Raises StrategyError if it is invalid.
    """
    if selector in WORDS:
        return None
    match = _BLOCKS.fullmatch(selector)
    if not match and _NAME.fullmatch(selector):
        return None
    if not match:
        raise StrategyError(
            f"'{shown(selector)}' is not a layer selector: use embed, head, a block as in 3, blocks as in 0-11, a name "
            "as in stage2, or *"
        )
    first, last = int(match[1]), int(match[2] or match[1])
    if last < first:
        raise StrategyError(f"blocks '{selector}' run backwards: write {last}-{first}")
    if last >= MAX_BLOCKS:
        raise StrategyError(
            f"'{selector}' names block {last}: models have at most {MAX_BLOCKS:,} blocks, numbered from 0"
        )
    return range(first, last + 1)


def numbered(groups: Groups, named: Mapping[str, range], model: str) -> Groups:
    """Return `groups` with block numbers in place of names.

    named: blocks by name, of the model called `model`.

    Raises StrategyError for a name that the model lacks.
    """
    return tuple((_numbered(selector, named, model), strategy) for selector, strategy in groups)


def _numbered(selector: str, named: Mapping[str, range], model: str) -> str:
    """Return `selector` with block numbers if it is a name."""
    if blocks_of(selector) is not None or selector in WORDS:
        return selector
    if selector not in named:
        known = f"{', '.join(named)} or numbers as in 0-11" if named else "numbers as in 0-11"
        raise StrategyError(
            f"{model} has no blocks called '{shown(selector)}'{nearest(selector, (*named, *WORDS[:2]))}: "
            f"use embed, head, {known}"
        )
    return _name(named[selector])


def layers_of(text: str, layer_names: Sequence[str], named: Mapping[str, range], model: str) -> frozenset[str]:
    """Return the names of the layers in a list such as `embed, 0-9`, in which `*` stands for all blocks.

    layer_names: those of the model (``ModelConfig.layer_names``).
    named: blocks by name, of the model called `model`.

    Raises StrategyError for an invalid selector, or one that the model lacks.
    """
    blocks, layers = layer_names[1:-1], set[str]()
    for selector in (part.strip() for part in text.split(",")):
        span = blocks_of(_numbered(selector, named, model))
        if span is None:
            layers |= set(blocks) if selector == "*" else {selector}
        elif span.stop > len(blocks):
            raise StrategyError(
                f"'{selector}' names block {span.stop - 1}, but {model} has {count(len(blocks), 'block')}, 0 to "
                f"{len(blocks) - 1}: change it"
            )
        else:
            layers |= {blocks[index] for index in span}
    return frozenset(layers)


def canonical(groups: Groups) -> Groups:
    """Return the groups in canonical order: embed, blocks by number, names in the order of their numbers, head, *.

    Equal neighbours are joined and repeated `*` dropped.

    Raises StrategyError if a layer is named twice.
    """
    words: dict[str, Strategy] = {}
    blocks: list[tuple[range, Strategy]] = []
    for selector, strategy in groups:
        span = blocks_of(selector)
        if span is None:
            if selector in words:
                raise StrategyError(f"'{selector}' is in two groups: give it one strategy")
            words[selector] = strategy
        else:
            blocks.append((span, strategy))
    blocks.sort(key=lambda group: group[0].start)
    joined: list[tuple[range, Strategy]] = []
    for span, strategy in blocks:
        if joined and span.start < joined[-1][0].stop:
            raise StrategyError(f"block {span.start} is in two groups: give it one strategy")
        if joined and span.start == joined[-1][0].stop and strategy == joined[-1][1]:
            span = range(joined.pop()[0].start, span.stop)
        joined.append((span, strategy))
    rest = words.get("*")
    named = [
        ("embed", words.get("embed")),
        *((_name(span), s) for span, s in joined),
        *((selector, words[selector]) for selector in sorted(words.keys() - {*WORDS}, key=_by_number)),
        ("head", words.get("head")),
    ]
    kept = [(selector, strategy) for selector, strategy in named if strategy is not None and strategy != rest]
    return (*kept, ("*", rest)) if rest is not None else tuple(kept)


def _by_number(name: str) -> tuple[str, int, str]:
    """Return a key that sorts stage2 before stage10."""
    word = name.rstrip("0123456789")
    return word, int(name.removeprefix(word) or 0), name


def _name(span: range) -> str:
    """Return the selector of a range of blocks."""
    return str(span.start) if len(span) == 1 else f"{span.start}-{span.stop - 1}"
