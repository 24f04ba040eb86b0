"""`vitpar plan`: show the effect of a strategy on a model without running it."""

from pathlib import Path
from typing import Any

import typer

from vitpar.errors import PlannerError, StrategyError
from vitpar.launch.resources import choose_device
from vitpar.planner.cost.layer import LayerCosts
from vitpar.planner.cost.price import price
from vitpar.planner.describe import layer_modules, summarize
from vitpar.planner.out_of_memory import less_memory
from vitpar.planner.report.data import gain_records, origin_to_json, plan_record
from vitpar.planner.search.gains import gains
from vitpar.planner.sources import recipe_costs
from vitpar.planner.training_time import training_time
from vitpar.recipe import Recipe
from vitpar.recipe.machine import replace_auto_precision
from vitpar.recipe.request import RecipeRequest
from vitpar.strategy import Plan
from vitpar.strategy.plan_json import write_plan
from vitpar.strategy.support import refuse_clashes
from vitpar.tasks import task_of
from vitpar.tasks.data import model_of
from vitpar.text import count, shown
from vitpar.training.optim.state_memory import frozen_bytes, moments, state_bytes, state_words
from vitpar.training.prepare import refuse_misfits
from vitpar_cli import recipe_options as o
from vitpar_cli.outputs import origin, print_json, warn
from vitpar_cli.plan_view import show
from vitpar_cli.profiled import MachineOptions, machine_options, planned_recipe, with_held
from vitpar_cli.search_view import show_prediction


@o.shared(
    asked=o.recipe(*o.SUBJECT, "epochs", "batch_size", *o.LAYOUT, "precision"),
    machine=machine_options(
        cluster="Predict time and memory on a cluster: 8xH100, 4x8xA100-40GB or a TOML file.",
        hardware="Predict from this hardware profile.",
        model_profile="Predict from this model profile.",
        num_classes="Classes of the model.  \\[default: the data's, or 1000]",
    ),
)
def plan(
    asked: RecipeRequest,
    machine: MachineOptions,
    strategy: str | None = typer.Argument(
        None,
        metavar="STRATEGY",
        help="Roles and degrees, such as pp2xtp2xdp2, for all layers or per layer, or a plan.json.  "
        "\\[default: the recipe's]",
    ),
    world_size: int | None = typer.Option(None, "--world-size", min=1, help="Number of ranks; fills an open degree."),
    modules: bool = typer.Option(False, "--modules", help="Also show how tp splits each module, and what it sends."),
    as_json: o.AsJson = False,
    out: Path | None = typer.Option(None, "--out", metavar="FILE", help="Write the plan as JSON."),
) -> None:
    """Show the effect of a strategy on a model: ranks, stages, memory, batch and communication.

    It needs no devices and no data. Put a strategy with spaces in quotes. With --cluster or profiles, it also predicts
    the time of a step and its parts, the memory of the fullest rank, whether that fits, the duration of the complete
    training, and what would make it faster.

    Example: vitpar plan pp2xtp2xdp2 --model vit_base_patch16_224 --batch-size 256

    Example: vitpar plan fsdp8 --model vit_huge_patch14_224 --batch-size 1024 --cluster 8xH100

    Example: vitpar plan "pp2: embed=fsdp4, 0-5=tp2xfsdp2, *=fsdp4+ckpt" --model vit_base_patch16_224
    """
    merged = planned_recipe(asked | {"parallel.mesh": strategy}, doing="a plan")
    needing = {"--epochs": asked.given.get("train.epochs"), "--images-per-second": machine.images_per_second}
    needing |= {"--memory": machine.memory, "--mtbf": machine.mtbf, "--price": machine.hour_price}
    for option, value in needing.items():
        if value is not None and not machine.named:
            raise PlannerError(f"{option} is given without a machine: add --cluster, or --hardware for profiles")
    whole, requested = machine.costs(merged) if machine.named else None, merged
    if whole is None:
        merged = replace_auto_precision(merged, choose_device(None))
    else:
        merged = merged.with_precision(whole.model.precision)
    config = model_of(merged, machine.num_classes, 1000) if whole is None else whole.whole
    world = world_size
    if world is None and whole is not None and merged.requested_plans()[0].is_open:
        world = whole.hardware.ranks
    chosen = merged.chosen(config, _closed if world is None else lambda plan: plan.resolve(world))
    made = chosen.plan
    warn(chosen.because)
    # Without a task any model may be planned, such as one for another task than the default.
    task = task_of(merged, config.num_classes) if "name" in merged.task.model_fields_set else None
    refuse_misfits(task, merged, config, made, None)
    state, frozen = state_bytes(merged, config), merged.frozen(config)
    train = merged.train
    summary = summarize(config, made, train.batch_size, train.precision, state, frozen, frozen_bytes(merged))
    summary |= {"modules": layer_modules(config, made)} if modules else {}
    summary |= {"predicted": _predict(made, requested, whole, machine)} if whole is not None else {}
    if out is not None:
        write_plan(out, made)
    if as_json:
        print_json(summary)
        return
    show(config, made, summary, state_words(merged))
    if whole is not None:
        show_prediction(summary["predicted"])
    if out is not None:
        typer.echo(f"\nplan written to {out}")


def _predict(plan: Plan, recipe: Recipe, costs: LayerCosts, machine: MachineOptions) -> dict[str, Any]:
    """Return the predicted time and memory of a plan on the devices that it uses.

    `less_memory` has the changes that need less memory, if the plan does not fit.

    recipe: recipe as requested, before its precision is resolved.
    costs: costs on all devices of the cluster, or on the profiled machine.

    Raises PlannerError and StrategyError.
    """
    ranks, hardware = plan.world_size, costs.hardware
    if ranks > hardware.ranks:
        raise PlannerError(
            f"'{shown(plan)}' takes {count(ranks, 'rank')} but {hardware.name} has {hardware.ranks}: use a smaller "
            "product of degrees, or a larger cluster"
        )
    precision, compiled = costs.model.precision, costs.model.compiled
    try:
        refuse_clashes(plan, precision, compiled)
    except StrategyError:
        if not compiled or machine.cluster is None or recipe.train.compile is not None:
            raise
        compiled = False  # as in training with the default of train.compile
    if machine.cluster is not None:  # costs on only as many devices as the plan uses
        costs = with_held(recipe_costs(recipe, costs.whole, machine.cluster, ranks, compiled), recipe)
    priced = price(plan, costs, recipe.train.batch_size, moments(recipe, costs.whole))
    limit = machine.budget(costs)
    fullest = max(priced.memory, key=lambda memory: memory.total)
    fits, batch_size = priced.memory_bytes <= limit, recipe.train.batch_size
    return {
        **origin_to_json(origin(), costs),
        "memory_budget_bytes": limit,
        "fits": fits,
        "less_memory": [] if fits else less_memory(fullest, costs.config, plan, batch_size, precision),
        "training": training_time(priced, machine.length(recipe, hardware.ranks)),
        "what_would_help": gain_records(gains((priced,), costs, limit, moments(recipe, costs.whole))),
        **plan_record(priced, costs),
    }


def _closed(plan: Plan) -> Plan:
    """Return the plan unchanged.

    Raises StrategyError if it has an open degree.
    """
    roles = [axis.role for strategy in plan.distinct for axis in strategy.axes if axis.degree is None]
    if plan.pp is None or roles:
        role = "pp" if plan.pp is None else roles[0]
        raise StrategyError(f"the degree of '{role}' in '{shown(plan)}' is open: give it a number, or --world-size N")
    return plan
