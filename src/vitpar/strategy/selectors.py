"""Layer selectors: `embed`, `head`, `3`, `0-11`, a name such as `stage2`, or `*`.

In a plan's groups `*` stands for all layers that no other group names, in a list of layers for all blocks.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from vitpar.errors import StrategyError
from vitpar.limits import MAX_BLOCKS
from vitpar.strategy.layer import Strategy
from vitpar.text import count, nearest, shown

Groups = tuple[tuple[str, Strategy], ...]
"""(selector, strategy) pairs."""
_BLOCKS = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")
_NAME = re.compile(r"[a-z][a-z_]{0,30}[0-9]{0,4}")
_WORDS = ("embed", "head", "*")
"""Selectors that are neither blocks nor names of blocks."""


def blocks_of(selector: str) -> range | None:
    """Return the blocks whose numbers `selector` gives; None for embed, head, * and names of groups of blocks.

    Raises StrategyError if it is invalid.
    """
    if selector in _WORDS:
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


def is_name(selector: str) -> bool:
    """Return whether `selector` is the name of a group of blocks, such as stage2."""
    return blocks_of(selector) is None and selector not in _WORDS


def numbered(groups: Groups, named: Mapping[str, range], model: str) -> Groups:
    """Return `groups` with block numbers in place of names.

    named: blocks by name, of the model called `model`.

    Raises StrategyError for a name that the model lacks.
    """
    return tuple((_numbered(selector, named, model), strategy) for selector, strategy in groups)


def _numbered(selector: str, named: Mapping[str, range], model: str) -> str:
    """Return `selector` with block numbers if it is a name."""
    if not is_name(selector):
        return selector
    if selector not in named:
        known = f"{', '.join(named)} or numbers as in 0-11" if named else "numbers as in 0-11"
        raise StrategyError(
            f"{model} has no blocks called '{shown(selector)}'{nearest(selector, (*named, *_WORDS[:2]))}: "
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
        *((selector, words[selector]) for selector in sorted(words.keys() - {*_WORDS}, key=_by_number)),
        ("head", words.get("head")),
    ]
    kept = [(selector, strategy) for selector, strategy in named if strategy is not None and strategy != rest]
    return (*kept, ("*", rest)) if rest is not None else tuple(kept)


def strategies(groups: Groups, layer_names: Sequence[str]) -> dict[str, Strategy]:
    """Return the strategy of every layer by name, in the order of `layer_names` (``ModelConfig.layer_names``).

    Without `*`, embed or head that is not named takes the strategy of its neighbouring block. Raises StrategyError if
    a block has no strategy, or a group names blocks that the model lacks.
    """
    words = {selector: strategy for selector, strategy in groups if blocks_of(selector) is None}
    if name := next((selector for selector in words if selector not in _WORDS), None):
        raise StrategyError(f"blocks are called '{name}', which only a model tells: validate the plan for the model")
    depth = len(layer_names) - 2
    by_block: dict[int, Strategy] = {}
    for selector, strategy in groups:
        span = blocks_of(selector)
        if span is None:
            continue
        if span.stop > depth:
            raise StrategyError(
                f"blocks {selector} are given a strategy but the model has {count(depth, 'block')}, 0 to {depth - 1}: "
                "change the group"
            )
        by_block |= dict.fromkeys(span, strategy)
    missing = [index for index in range(depth) if index not in by_block]
    if missing and "*" not in words:
        raise StrategyError(f"block {missing[0]} has no strategy: add a group such as *=dp2 for all that are not named")
    blocks = [by_block.get(index, words.get("*")) for index in range(depth)]
    embed = words.get("embed", words.get("*", blocks[0]))
    head = words.get("head", words.get("*", blocks[-1]))
    chosen = [embed, *blocks, head]
    return {name: strategy for name, strategy in zip(layer_names, chosen, strict=True) if strategy is not None}


def example(groups: Iterable[tuple[str, Strategy]]) -> str:
    """Return the groups as text, as in `embed=fsdp4, 0-11=tp2xfsdp2`."""
    return ", ".join(f"{selector}={strategy}" for selector, strategy in groups)


def _by_number(name: str) -> tuple[str, int, str]:
    """Return a key that sorts stage2 before stage10."""
    word = name.rstrip("0123456789")
    return word, int(name.removeprefix(word) or 0), name


def _name(span: range) -> str:
    """Return the selector of a range of blocks."""
    return str(span.start) if len(span) == 1 else f"{span.start}-{span.stop - 1}"
