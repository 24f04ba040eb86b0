"""Plan search from Python, and the setup that all searches share.

import vitpar

result = vitpar.search("vit_huge_patch14_224", cluster="8xH100", batch_size=1024, precision="bf16", memory="40GB")
best = result.plans[0]
print(best.plan, best.images_per_second, best.memory_bytes)
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from vitpar.errors import PlannerError
from vitpar.models.config import ModelConfig
from vitpar.models.families import model_config
from vitpar.planner.cost.layer import LayerCosts
from vitpar.planner.search.best import Progress, Search
from vitpar.planner.search.ranking import Result, SearchEffort
from vitpar.planner.search.space import FLAGS, ROLES, Space
from vitpar.planner.sources import known_flags, profiled_costs, recipe_costs, usual_budget
from vitpar.recipe import read_recipe
from vitpar.sizes import parse_size
from vitpar.strategy import SCHEDULES
from vitpar.text import count, shown, size
from vitpar.training.optim.state_memory import moments


def search(
    model: ModelConfig | str,
    *,
    batch_size: int | Sequence[int],
    cluster: str | None = None,
    hardware: Path | str | None = None,
    model_profile: Path | str | None = None,
    ranks: int | None = None,
    precision: str = "auto",
    compiled: bool | None = None,
    memory: float | str | None = None,
    microbatches: int | Sequence[int] | None = None,
    roles: Sequence[str] = ("pp", "dp", "fsdp", "tp"),
    without: Collection[str] = (),
    optimizer: str = "adamw",
    freeze: str | None = None,
    seconds: float = 20.0,
) -> Result:
    """Search the fastest plan whose ranks fit into memory, as `vitpar search` does. Needs no GPU.

    model: shape of the model, or its name (with 1,000 classes)
    batch_size: global images per step; of several sizes the best is chosen
    cluster: name of a cluster, such as 8xH100, or path of a TOML file; times are estimated from its data sheet
    hardware, model_profile: files written by `vitpar profile`, used without `cluster` (default: hardware.json,
        model.json)
    ranks: number of ranks (default: all of the cluster or profile)
    precision: fp64, fp32, bf16, fp16, fp8, or auto, which is bf16 on devices that support it
    compiled: whether blocks are compiled (default: on GPUs)
    memory: memory limit of a rank, in bytes or as in "40GB" (default: nine tenths of a device)
    microbatches: micro-batches per step (default: every number that divides the batch)
    roles: roles that plans may use
    without: flags and schedules to exclude, such as "ckpt" or "gpipe"
    optimizer: name of the optimizer, which determines the state per parameter
    freeze: layers and parameters that are not trained, as in the recipe's train.freeze
    seconds: time limit of the search after the first plan is found

    Returns the plans, best first, with an upper bound on the speed of any plan. Raises PlannerError for unreadable
    profiles, unknown names, and if no plan fits.
    """
    if cluster is not None and (hardware is not None or model_profile is not None):
        raise PlannerError("both a cluster and profiles are given: give one of the two")
    config = model_config(model, num_classes=1000) if isinstance(model, str) else model
    settings = {"data.path": "unused", "train.steps": 1, "train.precision": precision, "train.compile": compiled}
    recipe = read_recipe(None, settings | {"optimizer.name": optimizer, "train.freeze": freeze})
    if cluster is None:
        machine, profile = (None if file is None else Path(file) for file in (hardware, model_profile))
        costs = profiled_costs(recipe, lambda _: config, machine, profile)
    else:
        costs = recipe_costs(recipe, config, cluster, ranks)
    searching = make_search(
        costs,
        _several(batch_size, "batch_size"),
        moments(recipe, config),
        ranks=ranks,
        microbatches=None if microbatches is None else _several(microbatches, "microbatches"),
        roles=roles,
        without=without,
        seconds=seconds,
    )
    if memory is None:
        memory = usual_budget(costs)
    return run_search(searching, parse_size(memory, "memory") if isinstance(memory, str) else memory)


def make_search(
    costs: LayerCosts,
    batch_sizes: tuple[int, ...],
    num_moments: float,
    *,
    ranks: int | None = None,
    microbatches: tuple[int, ...] | None = None,
    roles: Sequence[str] | None = None,
    without: Collection[str] = (),
    schedules: Sequence[str] = tuple(SCHEDULES),
    seconds: float = 20.0,
) -> Search:
    """Return a search over the plans that `costs` can price.

    num_moments: copies of the parameters that the optimizer and the running average keep
    schedules: schedules that plans may use
    Other parameters are those of `search`.

    Raises PlannerError for unknown names and too many ranks.
    """
    roles = ROLES if roles is None else tuple(roles)
    if unknown := {*roles} - {*ROLES}:
        raise PlannerError(f"unknown role '{shown(min(unknown))}': use {', '.join(ROLES)}")
    if unknown := {*without} - {*FLAGS, *SCHEDULES}:
        raise PlannerError(f"unknown flag '{shown(min(unknown))}': use {', '.join((*FLAGS, *SCHEDULES))}")
    machine = costs.hardware
    if ranks is not None and ranks > machine.ranks:
        raise PlannerError(
            f"{count(ranks, 'rank')} are more than the {machine.ranks} of {machine.name}: profile the hardware with "
            "that many, or plan for a cluster from its data sheet"
        )
    space = Space(
        costs.config,
        ranks or machine.ranks,
        batch_sizes,
        costs.model.precision,
        costs.model.compiled,
        roles=roles,
        flags=tuple(flag for flag in known_flags(costs) if flag not in without),
        schedules=tuple(name for name in schedules if name not in without),
        tensors=costs.model.tensors,
        microbatch_counts=microbatches,
    )
    return Search(space, costs, num_moments, SearchEffort(seconds=seconds))


def run_search(searching: Search, budget: float, progress: Progress | None = None, most: float = 1e12) -> Result:
    """Run a search with a limit of `budget` bytes per rank.

    most: bytes per rank up to which the error names a plan that needs more.

    Raises PlannerError if no plan fits.
    """
    space = searching.space
    result = searching.best(budget, progress) if progress else searching.best(budget)
    if result.plans:
        return result
    counts = space.microbatch_counts
    if counts is not None and not any(batch % number == 0 for batch in space.batch_sizes for number in counts):
        batches = " or ".join(f"{batch:,}" for batch in space.batch_sizes)
        raise PlannerError(
            f"a batch of {batches} samples is not divisible by {counts[0]} micro-batches: use another number"
        )
    needed, limit = "", max(budget, 1e6)
    while not needed and limit < most:
        limit *= 1.5
        if plans := searching.best(limit).plans:
            least = min(plans, key=lambda price: price.memory_bytes)
            needed = f" ('{least.plan}' needs {size(least.memory_bytes)})"
    raise PlannerError(
        f"no plan fits into {size(budget)} per rank{needed}: allow more memory, more ranks, a smaller batch, other "
        "numbers of micro-batches, or leave out fewer roles and flags"
    )


def _several(numbers: int | Sequence[int], name: str) -> tuple[int, ...]:
    """Return one or several positive numbers as a tuple, else raise PlannerError about the parameter `name`."""
    values = (numbers,) if isinstance(numbers, int) else tuple(numbers)
    if not values or min(values) < 1:
        raise PlannerError(f"{name} is {shown(numbers)}: use whole numbers of at least 1")
    return values
