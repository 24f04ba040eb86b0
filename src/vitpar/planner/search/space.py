"""Space of plans that a search considers.

| part of a plan | considered                                                                                         |
|----------------|----------------------------------------------------------------------------------------------------|
| pipeline       | every degree that divides the ranks, outermost; every schedule; 1 or `virtual_stages` per rank     |
| stages         | any number of blocks each; with several stages per rank, even                                      |
| micro-batches  | every number that divides the batch                                                                |
| blocks         | any mix of strategies (`mixing`); with several stages per rank, one for all                        |
| several kinds  | with several stages per rank, one strategy where it fits and its dp or fsdp counterpart in the     |
| of blocks      | other sections (`sections`)                                                                        |
| embed, head    | any strategy; with several stages per rank, that of the blocks, and for the best plans others      |
| layers that    | the strategy that one of them would have by the rows above                                         |
| share          |                                                                                                    |
| strategy       | dp, fsdp, tp of any degrees and order; every tensor mode, +sp, +zero1, +zero2; every checkpoint    |
|                | policy; +offload if fsdp shards and there is no dp                                                 |

Not considered: +offload without fsdp or with dp, communication settings other than the default. One of them is
considered under another name: fsdp without dp, with reshard_after_forward = false, is dp with +zero1. The latter
gathers only once for all micro-batches of a step.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import permutations, product
from typing import Any

from vitpar.errors import StrategyError
from vitpar.models.config import ModelConfig
from vitpar.models.description import block_index, is_block, layer_of
from vitpar.planner.cost.layer import tensor_name
from vitpar.planner.search.sections import Sections, counterparts, sections_of
from vitpar.strategy import SCHEDULES, Axis, Plan, Strategy, validate
from vitpar.strategy.batch import schedule_objection
from vitpar.strategy.layer import TENSOR_MODES
from vitpar.strategy.selectors import canonical
from vitpar.strategy.support import features, first_clash, layer_features
from vitpar.text import divisors

FLAGS = ("sp", "2d", "2.5d", "3d", "zero1", "zero2", "ckpt", "ckpt.selective", "offload")
ROLES = ("pp", "dp", "fsdp", "tp")


@dataclass(frozen=True)
class Space:
    """The plans that a search considers, for one model and number of ranks."""

    config: ModelConfig
    """Shape of the model."""
    ranks: int
    """Number of ranks of the plans."""
    batch_sizes: tuple[int, ...]
    """Global images per step, one search covers all of them."""
    precision: str = "fp32"
    """Training precision."""
    compiled: bool = False
    """Whether blocks are compiled."""
    roles: tuple[str, ...] = ROLES
    """Roles that strategies may use."""
    flags: tuple[str, ...] = FLAGS
    """Flags that strategies may use."""
    schedules: tuple[str, ...] = tuple(SCHEDULES)
    """Pipeline schedules."""
    virtual_stages: tuple[int, ...] = (2,)
    """Stages per rank under schedules with several."""
    tensors: tuple[str, ...] | None = None
    """Names of tensor-parallel parts in model profiles, e.g. those that were profiled; None for all that fit the model.
    """
    microbatch_counts: tuple[int, ...] | None = None
    """Numbers of micro-batches to consider; None for all that divide the batch."""

    def pipelines(self) -> Iterator[Plan]:
        """Yield the pipelines as plans without layers: degree, schedule, virtual stages."""
        for pp in divisors(self.ranks):
            if pp == 1:
                yield Plan()
            elif "pp" in self.roles:
                for schedule in self.schedules:
                    counts = {"one": (1,), "two": (2,), "several": self.virtual_stages}[SCHEDULES[schedule].stages]
                    for virtual in counts:
                        if pp * virtual <= self.config.num_blocks:
                            yield Plan(pp=pp, schedule=schedule, virtual_stages=virtual)

    def microbatches(self, pipeline: Plan, batch_size: int) -> list[int]:
        """Return the numbers of micro-batches to consider that divide the batch and that the schedule can run."""
        wanted = self.microbatch_counts
        counts = divisors(batch_size) if wanted is None else [n for n in wanted if batch_size % n == 0]
        return [n for n in counts if not schedule_objection(pipeline, n)]

    @cached_property
    def sections(self) -> Sections:
        """Sections of the model's blocks."""
        return _sections(self.config)

    def strategies(self, size: int) -> Collection[Strategy]:
        """Return the strategies of a layer on a stage of `size` ranks that the model allows, in one section or more."""
        return _strategies(self.config, size, self.roles, self.flags, self.tensors)

    def combinations(self, size: int) -> tuple[tuple[Strategy, ...], ...]:
        """Return the strategies of all sections on a stage of `size` ranks, for plans with one strategy.

        Sections that tp cannot split get the strategy's dp or fsdp counterpart instead.
        """
        strategies, sections = self.strategies(size), self.sections.sections
        if len(sections) == 1:
            return tuple((strategy,) for strategy in strategies)
        known, combined = {strategy: strategy for strategy in strategies}, list[tuple[Strategy, ...]]()
        for strategy in strategies:
            fits = [section.fits(strategy) for section in sections]
            for other in (strategy,) if all(fits) else counterparts(strategy):
                if other in known:
                    combined.append(tuple(strategy if fit else known[other] for fit in fits))
        return tuple(combined)

    def covers(self, plan: Plan) -> bool:
        """Return whether the space contains a plan with one strategy, with any number of micro-batches."""
        pp = plan.pipeline_degree
        pipelined = pp == 1 or ("pp" in self.roles and plan.schedule in self.schedules)
        return pipelined and plan.strategy in self.strategies(self.ranks // pp)

    def allows(self, pipeline: Plan, strategy: Strategy) -> bool:
        """Return whether the support matrix allows `strategy` in `pipeline`, at the training's precision."""
        present = features(pipeline, self.precision, self.compiled) | layer_features(strategy)
        return first_clash(present) is None


_sections = lru_cache(maxsize=64)(sections_of)


@lru_cache(maxsize=256)
def _strategies(
    config: ModelConfig, size: int, roles: tuple[str, ...], flags: tuple[str, ...], tensors: tuple[str, ...] | None
) -> Collection[Strategy]:
    """Return what `Space.strategies` does."""
    strategies: dict[Strategy, None] = {}  # an ordered set
    policies = (None, *(name for flag, name in (("ckpt", "full"), ("ckpt.selective", "selective")) if flag in flags))
    for dp, fsdp, tp in _products(size):
        degrees = {role: n for role, n in (("dp", dp), ("fsdp", fsdp), ("tp", tp)) if n > 1}
        if not set(degrees) <= set(roles):
            continue
        for order in permutations(degrees.items()):
            axes = tuple(Axis(role, n) for role, n in order)  # type: ignore[arg-type]
            for tensor in _tensor_ways(config, axes, flags):
                if tensors is not None and tensor_name(tensor) not in tensors:
                    continue
                zeros = [0, *(z for z in (1, 2) if f"zero{z}" in flags and dp > 1 and fsdp == 1)]
                homes = (False, True) if "offload" in flags and fsdp > 1 and dp == 1 else (False,)
                for zero, policy, offload in product(zeros, policies, homes):
                    strategies[replace(tensor, zero=zero, checkpoint=policy, offload=offload)] = None
    return strategies.keys()


def _products(size: int) -> Iterator[tuple[int, int, int]]:
    """Yield all (dp, fsdp, tp) degrees whose product is `size`."""
    for dp in divisors(size):
        for fsdp in divisors(size // dp):
            yield dp, fsdp, size // dp // fsdp


def _tensor_ways(config: ModelConfig, axes: tuple[Axis, ...], flags: tuple[str, ...]) -> Iterator[Strategy]:
    """Yield the tensor-parallel modes on `axes` that can split the model, as strategies without other flags.

    A mode that splits some sections only is yielded too.
    """
    plain, sections = Strategy(axes), _sections(config).sections
    tries: list[dict[str, Any]] = [{}]
    if plain.has("tp"):
        tries += [{"sequence_parallel": True}] if "sp" in flags else []
        tries += [{"tensor_mode": mode} for mode in TENSOR_MODES[1:] if mode in flags]
    for fields in tries:
        try:
            strategy = replace(plain, **fields)
            if strategy.tensor_mode == "2.5d":
                depth = dict(strategy.tensor_shape)["d"]
                if depth == 1:
                    continue  # the same as 2d
            if len(sections) == 1:
                validate(Plan(layers=(("*", strategy),)), config, None)
            elif not any(section.fits(strategy) for section in sections):
                continue
        except StrategyError:
            continue
        yield strategy


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
