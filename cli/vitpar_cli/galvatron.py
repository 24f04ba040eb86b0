"""`vitpar galvatron`: import and export Galvatron's strategy files, and import its profiles."""

import json
from pathlib import Path
from typing import Annotated

import typer

from vitpar.errors import RecipeError
from vitpar.planner.profile.galvatron import UNMEASURED, import_hardware, import_model
from vitpar.recipe.machine import automatic_precision
from vitpar.recipe.request import RecipeRequest
from vitpar.sizes import parse_size
from vitpar.strategy.galvatron import from_galvatron, to_galvatron, unlisted_blocks
from vitpar.strategy.plan_json import plan_to_json, read_json, write_plan, write_text
from vitpar.terminal import say
from vitpar.text import count
from vitpar_cli import recipe_options as o
from vitpar_cli.outputs import origin, origin_words, print_json, refuse_unwritable
from vitpar_cli.profiled import planned_recipe

LEFT_OUT = "The file does not say the precision, nor whether tp has +sp. Keys that it lacks have Galvatron's defaults."
MERGING = "Layers that merge patches have the strategy of embed in Galvatron. In vitpar they belong to the next block."
app = typer.Typer(
    no_args_is_help=True,
    help="Read and write Galvatron's strategy files, and read its profiles.\n\n"
    "Example: vitpar galvatron import plan_23GB.json --world-size 4 --out plan.json",
    short_help="Read and write Galvatron's strategy files, and read its profiles.",
)


@app.command("import")
@o.shared(asked=o.recipe("assignments", "model"))
def import_command(
    asked: RecipeRequest,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Galvatron's JSON, with pp_deg and tp_sizes_enc.")],
    world_size: Annotated[int, typer.Option("--world-size", min=1, help="Number of ranks, which is not in the file.")],
    out: Path | None = typer.Option(None, "--out", metavar="PLAN", help="Write the plan as JSON, for --mesh."),
    as_json: o.AsJson = False,
) -> None:
    """Convert a strategy file of Galvatron to a plan. The file of a T5 needs --model.

    Example: vitpar galvatron import plan_23GB.json --world-size 4 --out plan.json
    """
    asked.refuse_idle("an import")
    model = asked.given.get("model.name")
    if asked.assignments and not model:
        raise RecipeError("--set is given without --model: name the model whose settings it changes")
    config = planned_recipe(asked).config(1000) if model else None
    unlisted = unlisted_blocks(config.layers.values()) if config else ()
    read = from_galvatron(read_json(file), world_size, config.num_blocks if config else None, unlisted)
    notes = [LEFT_OUT]
    if config and len(config.block_kinds) > 1 and not unlisted and not read.plan.is_uniform:
        notes.append(MERGING)
    if out is not None:
        write_plan(out, read.plan)
    if as_json:
        plan = {"plan": plan_to_json(read.plan), "strategy": str(read.plan), "batch_size": read.batch_size}
        print_json({**origin(), **plan, "blocks": read.num_blocks, "notes": notes})
        return
    typer.echo(f"{read.plan}")
    typer.echo(origin_words(origin()))
    parts = count(read.plan.microbatches or 1, "micro-batch")
    typer.echo(f"{count(read.num_blocks, 'block')}, batch {read.batch_size}, {parts} per step")
    for note in notes:
        say(f"note: {note}")
    if out is not None:
        typer.echo(f"plan written to {out}: train with --mesh {out} --batch-size {read.batch_size}")


@app.command("export")
@o.shared(asked=o.recipe("recipe", "assignments", "model", "batch_size", "microbatches", "schedule", "split"))
def export_command(
    asked: RecipeRequest,
    strategy: Annotated[str, typer.Argument(metavar="STRATEGY", help="A strategy string, or a plan.json.")],
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="The file to write.")],
) -> None:
    """Write a plan as a strategy file of Galvatron. Plans that Galvatron cannot express are refused.

    Example: vitpar galvatron export pp2xfsdp2xtp2 --model vit_huge_patch14_224 --batch-size 64 --out galvatron.json
    """
    merged = (asked | {"parallel.mesh": strategy}).read()
    config = merged.config(1000)
    plan = merged.plan(config)
    costs = [float(flops) for flops in config.layer_flops.values()]
    unlisted = unlisted_blocks(config.layers.values())
    content = to_galvatron(plan, config.num_blocks, merged.train.batch_size, costs, unlisted)
    write_text(out, json.dumps(content, indent=2) + "\n")
    typer.echo(f"{plan} of {config.name} written to {out}")


@app.command("profiles")
@o.shared(asked=o.recipe("recipe", "assignments", "model", "precision"))
def profiles_command(
    asked: RecipeRequest,
    hardware: Annotated[
        Path,
        typer.Argument(metavar="HARDWARE", help="Folder with allreduce_bandwidth_*.json and p2p_bandwidth_*.json."),
    ],
    profiled: Annotated[
        Path,
        typer.Argument(metavar="MODEL", help="Folder with computation_profiling_*.json and memory_profiling_*.json."),
    ],
    memory: Annotated[
        str, typer.Option("--memory", metavar="SIZE", help="Memory of a GPU, such as 40GB, which is not in the files.")
    ],
    nodes: int = typer.Option(1, "--nodes", min=1, help="Nodes of the hardware profile."),
    devices: int = typer.Option(8, "--devices", min=1, help="GPUs per node of the hardware profile."),
    hardware_out: Path = typer.Option(
        Path("hardware.json"), "--hardware-out", metavar="FILE", help="The hardware profile to write."
    ),
    model_out: Path = typer.Option(
        Path("model.json"), "--model-out", metavar="FILE", help="The model profile to write."
    ),
    num_classes: int = typer.Option(1000, "--num-classes", min=1, help="Classes of the model."),
) -> None:
    """Convert Galvatron's profiles of a machine and a model to vitpar's, for `vitpar search`.

    Example: vitpar galvatron profiles hardware_8xA100 vit-huge --memory 40GB --model vit_huge_patch16_224
    """
    asked.refuse_idle("an import")
    refuse_unwritable(hardware_out, model_out)
    merged = planned_recipe(asked)
    machine = import_hardware(hardware, nodes, devices, int(parse_size(memory)))
    precision = merged.with_precision(automatic_precision(None, machine.device)).train.precision
    config = merged.config(num_classes)
    model_profile = import_model(profiled, config, precision)
    machine.save(hardware_out)
    model_profile.save(model_out)
    typer.echo(origin_words(origin()))
    blocks = next(layer for layer in model_profile.layers if config.kinds[layer.layer].is_block)
    sizes = [str(timing.size) for timing in blocks.forward.timings]
    batches = f"blocks profiled with batches of {', '.join(sizes)}"
    typer.echo(f"{len(machine.links)} links of {nodes}x{devices} {machine.name} written to {hardware_out}")
    typer.echo(
        f"{model_profile.model['name']} in {model_profile.precision}, {', '.join(model_profile.tensors)}, {batches}, "
        f"written to {model_out}"
    )
    say(f"note: {UNMEASURED}")
