"""Plans whose first or last layer has another strategy than the block next to it, also to share a parameter."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product

from vitpar.models.config import ModelConfig
from vitpar.models.description import block_index, is_block, layer_of
from vitpar.strategy import Plan, Strategy
from vitpar.strategy.selectors import canonical


def tied_layers(config: ModelConfig) -> tuple[frozenset[str], ...]:
    """Return the names of the layers that share a parameter and need one strategy, for each such parameter."""
    shared = (names for owner, names in config.holders.items() if owner not in config.tables)
    tied = (frozenset(map(layer_of, names)) for names in shared)
    return tuple(dict.fromkeys(layers for layers in tied if len(layers) > 1))


def with_tied_alike(plan: Plan, config: ModelConfig, tied: Sequence[Collection[str]]) -> Iterator[Plan]:
    """Yield `plan` if the layers of each of `tied` have one strategy, else the plans that give them one of theirs."""
    if plan.is_uniform or not tied:
        yield plan
        return
    strategies = plan.strategies(config.layer_names)
    theirs = [tuple(dict.fromkeys(strategies[name] for name in strategies if name in layers)) for layers in tied]
    if all(len(each) == 1 for each in theirs):
        yield plan
        return
    for chosen in product(*theirs):
        changed = {name: strategy for layers, strategy in zip(tied, chosen, strict=True) for name in layers}
        yield with_layers(plan, {**strategies, **changed})


def with_layers(plan: Plan, strategies: Mapping[str, Strategy]) -> Plan:
    """Return `plan` with these strategies by layer; embed and head are left out where the next block has theirs."""
    if len({*strategies.values()}) == 1:
        return replace(plan, layers=(("*", next(iter(strategies.values()))),))
    embed, *blocks, head = strategies
    groups = [(str(block_index(name)) if is_block(name) else name, strategy) for name, strategy in strategies.items()]
    left_out = {
        end for end, next_to in ((embed, blocks[0]), (head, blocks[-1])) if strategies[end] == strategies[next_to]
    }
    return replace(plan, layers=canonical(tuple(group for group in groups if group[0] not in left_out)))
