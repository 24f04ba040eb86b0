"""`vitpar train --mesh auto`: measure what no profile covers, search, print the plan and the reasons for it.

| process | task |
|---|---|
| started by the user | profiles in subprocesses, searches, starts the ranks |
| rank 0 under a launcher (torchrun, srun, mpirun) | reads profiles, searches, sends the plan to the other ranks |

A resumed run keeps its plan if the number of ranks is the same.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console

from vitpar.errors import PlannerError, UserError
from vitpar.io import parse_json
from vitpar.launch import find_world
from vitpar.launch.store import meeting_place
from vitpar.launch.world import Device
from vitpar.models import ModelConfig, config_to_json
from vitpar.planner.automatic import make_search, run_search
from vitpar.planner.cost.layer import LayerCosts
from vitpar.planner.out_of_memory import refuse_impossible
from vitpar.planner.profile.profiles import HARDWARE, MODEL, Hardware, ModelProfile
from vitpar.planner.report.data import plan_record, search_record, speed_words
from vitpar.planner.sources import NO_COSTS, profiled_costs, recipe_costs
from vitpar.planner.training_time import training_length, training_time
from vitpar.recipe import Recipe, read_recipe
from vitpar.recipe.machine import choose_plan, default_ranks, resolve
from vitpar.recipe.recipe import Chosen
from vitpar.recipe.sections.running import AUTO
from vitpar.strategy import SCHEDULES, parse
from vitpar.strategy.plan_json import plan_from_json, plan_to_json
from vitpar.terminal import complain
from vitpar.text import shown, size
from vitpar.training.optim.state_memory import moments
from vitpar_cli.outputs import make_folder, origin
from vitpar_cli.profiled import PROFILES, MachineOptions, found, with_held
from vitpar_cli.search_view import SearchProgress, show_choice

if TYPE_CHECKING:
    from torch.distributed import Store


@dataclass
class PlanChooser:
    """Choice of the plan of `vitpar train`, with the options that only `--mesh auto` uses."""

    machine: MachineOptions
    """Cluster or profiles, which are measured if they are not there, and memory limit."""
    ranks: int | None
    """Number of ranks; if None, all GPUs, or one rank per CPU core."""
    quiet: bool = False
    """Whether to print only progress."""
    store: Store | None = None
    """Store through which the ranks of a launcher have agreed on a searched plan; else None."""

    def __call__(self, recipe: Recipe, config: ModelConfig, device: Device, run: Path | None) -> Chosen:
        """Return the plan of a recipe, searched if its mesh is auto.

        recipe: recipe whose precision is resolved for the device.
        run: recipe.toml of the run to resume; None for a new run.

        Raises PlannerError, RecipeError and StrategyError.
        """
        if recipe.parallel.mesh != AUTO:
            for name, value in {**asdict(self.machine), "ranks": self.ranks}.items():
                if value is not None:
                    option, mesh = f"--{name.replace('_', '-')}", shown(recipe.parallel.mesh)
                    raise PlannerError(f"{option} requires --mesh {AUTO}, but the mesh is '{mesh}': leave one out")
            chosen = choose_plan(recipe, config, device)
        elif idle := recipe.parallel.model_fields_set - {"mesh", "microbatches", "schedule"}:
            raise PlannerError(
                f"parallel.{min(idle)} is searched with --mesh {AUTO}: leave it out, or give --mesh a strategy"
            )
        else:
            # Refuses more ranks than the launcher or the GPUs provide.
            ranks = resolve(parse(f"dp{self.ranks or default_ranks(device)}"), device).world_size
            chosen, self.store = _find_once(
                lambda: _plan_of_run(recipe, config, ranks, run) or _search(recipe, config, device, ranks, self)
            )
        if device == "cpu":
            world, plan = find_world(), chosen.plan
            refuse_impossible(recipe, config, plan, world.local_size if world else plan.world_size)
        return chosen


def _plan_of_run(recipe: Recipe, config: ModelConfig, ranks: int, run: Path | None) -> Chosen | None:
    """Return the plan of the run to resume if it is valid and needs `ranks` ranks, else None.

    run: recipe.toml of the run; None for a new run.
    """
    if run is None:
        return None
    saved = read_recipe(run)
    try:
        plan = recipe.model_copy(update={"parallel": saved.parallel, "communication": saved.communication}).plan(config)
    except UserError:  # such as a missing plan.json, or a batch that the plan does not divide
        return None
    return Chosen(plan, f"the run resumes under its plan '{shown(plan)}'") if plan.world_size == ranks else None


def _search(recipe: Recipe, config: ModelConfig, device: Device, ranks: int, options: PlanChooser) -> Chosen:
    """Search for the best plan for `ranks` ranks, print it unless the options are quiet, and return it.

    Raises PlannerError and RecipeError.
    """
    train, parallel = recipe.train, recipe.parallel
    machine = options.machine
    if machine.cluster is None:
        costs = _profiled(recipe, config, device, ranks, machine)
    else:
        costs = recipe_costs(recipe, config, machine.cluster, ranks)
    searching = make_search(
        with_held(costs, recipe),
        (train.batch_size,),
        moments(recipe, config),
        ranks=ranks,
        microbatches=None if parallel.microbatches is None else (parallel.microbatches,),
        schedules=(parallel.schedule,) if "schedule" in parallel.model_fields_set else tuple(SCHEDULES),
    )
    limit = machine.budget(costs)
    with SearchProgress() as progress:
        result = run_search(searching, limit, progress)
    best = result.plans[0]
    plan = recipe.under(best.plan).plan(config)
    if not options.quiet:
        training = training_time(best, training_length(recipe))
        found_plan = search_record(searching, result, limit, origin(), training=training, frontier=False)
        show_choice(Console(highlight=False), found_plan)
        typer.echo("")
    words = f"{speed_words(plan_record(best, costs))}, {size(best.memory_bytes)} of {size(limit)} per rank"
    return Chosen(plan, f"the plan was searched, predicted: {words}")


def _profiled(recipe: Recipe, config: ModelConfig, device: Device, ranks: int, given: MachineOptions) -> LayerCosts:
    """Return costs from profiles.

    Profiles are those given, else matching ones in the current folder or PROFILES, else new measurements.
    """
    import torch

    from vitpar.planner.measure.device import device_name

    name = device_name(torch.device(device))

    def is_here(path: Path) -> bool:
        there = Hardware.read(path)
        return (there.ranks, there.device, there.device_name) == (ranks, device, name)

    def costs(path: Path) -> LayerCosts:
        return profiled_costs(recipe, lambda _: config, machine, path)

    for named, profile in ((given.hardware, Hardware), (given.model_profile, ModelProfile)):
        if named is not None:
            profile.read(named)  # fail before minutes of measuring
    machine = given.hardware or _find_or_measure(
        (HARDWARE, PROFILES / f"hardware-{_slug(name)}-{ranks}.json"),
        is_here,
        "this machine",
        ("hardware", "--ranks", str(ranks), "--device", device),
    )
    shape = {key: value for key, value in config_to_json(config).items() if key not in NO_COSTS}
    train = recipe.train
    fp8 = [train.fp8_min_features, train.fp8_fast_accum] if train.precision == "fp8" else []
    subject = [shape, name, train.precision, train.compile, train.attention, *fp8]
    digest = hashlib.sha256(json.dumps(subject, sort_keys=True).encode()).hexdigest()[:12]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "recipe.toml"
        file.write_text(recipe.to_toml(), encoding="utf-8")
        words = ["--recipe", str(file), "--num-classes", str(config.num_classes), "--ranks", str(ranks)]
        for option, own in (("--model", recipe.model.name), ("--task", recipe.task.name)):
            words += [option, own] if ".py:" in own else []
        model = given.model_profile or _find_or_measure(
            (MODEL, PROFILES / f"{_slug(config.name)}-{train.precision}-{ranks}-{digest}.json"),
            costs,
            f"{config.name} in {train.precision}",
            ("model", *words, "--device", device),
        )
    return costs(model)


def _find_or_measure(
    paths: tuple[Path, Path], fits: Callable[[Path], object], what: str, words: tuple[str, ...]
) -> Path:
    """Return the first of two profiles that matches, or else measure and return the second.

    fits: function that checks whether a profile matches.
    what: subject of the profile, for messages.
    words: arguments of `vitpar profile` that measure it.

    Raises PlannerError if neither matches under a launcher, or if the folder for profiles cannot be made.
    Raises typer.Exit if measuring fails.
    """
    if path := found(fits, *paths):
        return path
    target = paths[-1]
    if find_world() is not None:
        command = "vitpar profile hardware" if words[0] == "hardware" else "vitpar profile model --recipe FILE"
        raise PlannerError(
            f"no profile of {what} found ({paths[0]}), and ranks of a launcher cannot measure one: run "
            f"`{command}` first, or plan from a data sheet with --cluster"
        )
    complain(f"measuring {what}, once: a few minutes, saved to {target}")
    make_folder(target.parent, "run in a writable folder, or give profiles with --hardware and --model-profile")
    # -P: do not import modules from the current folder.
    command_line = [sys.executable, "-P", "-m", "vitpar_cli.main", "profile", *words, "--out", str(target)]
    code = subprocess.run(command_line, stdout=subprocess.DEVNULL, check=False).returncode
    if code:  # it has printed the reason
        raise typer.Exit(code)
    return target


def _slug(name: str) -> str:
    return "-".join("".join(c if c.isalnum() else " " for c in name.lower()).split())[:60]


def _find_once(find: Callable[[], Chosen]) -> tuple[Chosen, Store | None]:
    """Call `find` on rank 0 of a launcher's world, and return its result and the store for communication on all ranks.

    Without a launcher, call `find` in this process and return None for the store.

    Raises the errors of `find` on rank 0, and PlannerError with the same message on other ranks.
    """
    world = find_world()
    met = None if world is None else meeting_place(world)
    if world is None or met is None:
        return find(), None
    from torch.distributed import PrefixStore

    # An elastic launcher keeps its store and its keys when it restarts the ranks, so use new keys for each attempt.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    answers, rest = PrefixStore(f"plan/{attempt}", met), PrefixStore(f"run/{attempt}", met)
    if world.rank:
        answer = parse_json(answers.get("plan").decode())
        if "error" in answer:
            raise PlannerError(str(answer["error"]))
        return Chosen(plan_from_json(answer["plan"]), answer["because"]), rest
    try:
        chosen = find()
    except UserError as error:
        answers.set("plan", json.dumps({"error": str(error)}))
        raise
    answers.set("plan", json.dumps({"plan": plan_to_json(chosen.plan), "because": chosen.because}))
    return chosen, rest
