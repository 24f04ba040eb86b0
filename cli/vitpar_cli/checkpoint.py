"""`vitpar checkpoint`: list, verify and compare checkpoints, export weights from them, and import weights."""

import shlex
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.filesize import decimal
from rich.progress import track

from vitpar.checkpoint.folder import Checkpoint
from vitpar.checkpoint.index import PLAN, RECIPE, damage
from vitpar.errors import CheckpointError
from vitpar.models import config_to_json
from vitpar.models.lora import LoRA
from vitpar.recipe import read_recipe
from vitpar.sizes import parse_size
from vitpar.strategy.freezing import parameter_names
from vitpar.strategy.plan_json import read_plan
from vitpar.terminal import say
from vitpar.text import count
from vitpar.training.saving.resume import changes, checkpoints_of, is_checkpoint
from vitpar_cli.outputs import data_table, print_json, print_rows, progress_bar, warn
from vitpar_cli.recipe_options import AsJson

if TYPE_CHECKING:
    from vitpar.weights.folder import Weights

app = typer.Typer(
    no_args_is_help=True,
    help="Show, verify, compare and export the checkpoints of runs; import weights from elsewhere.\n\n"
    "Example: vitpar checkpoint list runs/mine",
    short_help="Show, verify, compare and export checkpoints; import weights from elsewhere.",
)

Run = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.")]
Path_ = Annotated[Path, typer.Argument(metavar="PATH", help="A checkpoint, or a run to use its newest checkpoint.")]
Out = Annotated[Path, typer.Option("--out", metavar="DIR", help="New folder for the weights.")]
ExportFormat = Literal["vitpar", "timm", "transformers", "onnx"]
"""Libraries whose names and files `export` writes."""
_GROUPS = ("model", "optimizer", "ema")  # first parts of the names of tensors in a checkpoint
_WORST = 10  # maximum tensors that `diff` lists


def _refuse_missing(path: Path) -> None:
    """Raise CheckpointError if `path` is not a folder, before torch is imported, which takes seconds."""
    if not path.is_dir():
        raise CheckpointError(f"there is no folder '{path}': give a run such as runs/mine, or a checkpoint in it")


def _opened(path: Path) -> Checkpoint:
    """Return the checkpoint in `path`, or the newest one if `path` is a run. Raises CheckpointError."""
    _refuse_missing(path)
    if is_checkpoint(path):
        return Checkpoint.open(path)
    there = checkpoints_of(path)
    if not there.steps():
        raise CheckpointError(
            f"'{path}' is neither a checkpoint nor a run with one: give a run such as runs/mine, or a checkpoint in it"
        )
    return Checkpoint.open(there.path(there.steps()[-1]))


@app.command("list")
def list_command(run: Run, as_json: AsJson = False) -> None:
    """List the checkpoints of a run, oldest first.

    Example: vitpar checkpoint list runs/mine
    """
    _refuse_missing(run)
    there = checkpoints_of(run)
    if not there.steps():
        raise CheckpointError(f"'{run}' has no checkpoints: give the folder of a run that saved some")
    records: list[dict[str, Any]] = []
    best = None  # according to the newest checkpoint
    for step in there.steps():
        path = there.path(step)
        row: dict[str, Any] = {"path": str(path), "step": step}
        try:
            checkpoint = Checkpoint.open(path)
            sizes = [file.bytes for file in checkpoint.index.files.values()]
            row |= {"samples": checkpoint.facts.samples, "bytes": sum(sizes), "ranks": len(checkpoint.index.shards)}
            best = checkpoint.facts.best or best
            row["problem"] = None
        except CheckpointError as error:
            row["problem"] = str(error)
        with suppress(FileNotFoundError):  # the run is still training and has removed it
            written = datetime.fromtimestamp(path.stat().st_mtime).isoformat(timespec="seconds")
            records.append({**row, "written": written})
    for row in records:
        row["best"] = best is not None and best.step == row["step"]
    if as_json:
        print_json(records)
        return
    table = data_table("step", "samples", "written", "size", "files", "note")
    for row in records:
        if row["problem"]:
            table.add_row(f"{row['step']:,}", "", row["written"], "", "", f"[red]{row['problem']}")
            continue
        size, mark = decimal(row["bytes"]), "best" if row["best"] else ""
        table.add_row(
            f"{row['step']:,}", f"{row['samples']:,}", row["written"].replace("T", " "), size, str(row["ranks"]), mark
        )
    Console().print(table)


@app.command("info")
def info_command(path: Path_, as_json: AsJson = False) -> None:
    """Show the content of a checkpoint.

    Example: vitpar checkpoint info runs/mine/checkpoints/step_900
    """
    checkpoint = _opened(path)
    import torch

    groups = {}
    for group in _GROUPS:
        inside = [stored for name, stored in checkpoint.index.tensors.items() if name.partition(".")[0] == group]
        elements = [torch.Size(stored.shape).numel() for stored in inside]
        size = sum(n * getattr(torch, stored.dtype).itemsize for n, stored in zip(elements, inside, strict=True))
        groups[group] = {"tensors": len(inside), "elements": sum(elements), "bytes": size}
    plan = str(read_plan(checkpoint.path / PLAN))
    record = {"path": str(checkpoint.path), **checkpoint.facts.model_dump(), "plan": plan, "tensors": groups}
    if as_json:
        print_json(record)
        return
    console, facts = Console(highlight=False), checkpoint.facts
    console.print(record["path"], markup=False, soft_wrap=True)
    rows = {"after": f"step {facts.step:,}, {facts.samples:,} samples", "plan": plan}
    if facts.loss_scale:
        rows["loss scale"] = f"{facts.loss_scale.scale:,.10g}"
    if facts.best:
        rows["best"] = f"step {facts.best.step:,}, {facts.best.metric} {facts.best.value:.4g}"
    print_rows(console, rows.items())
    table = data_table("", "tensors", "elements", "size")
    for group, sums in groups.items():
        table.add_row(group, f"{sums['tensors']:,}", f"{sums['elements']:,}", decimal(sums["bytes"]))
    console.print(table)


@app.command("verify")
def verify_command(path: Path_) -> None:
    """Read a checkpoint and compare its files with their checksums. Exits with 1 if a file is damaged.

    Example: vitpar checkpoint verify runs/mine/checkpoints/step_900
    """
    checkpoint = _opened(path)
    files = checkpoint.index.files.items()
    console = Console(stderr=True)
    problems = [
        problem
        for name, stored in track(files, "reading", console=console, transient=True)
        if (problem := damage(checkpoint.path, {name: stored}))
    ]
    for problem in problems:
        typer.echo(problem)
    if problems:
        raise typer.Exit(1)
    size = decimal(sum(stored.bytes for _, stored in files))
    typer.echo(f"{checkpoint.path}: {len(files)} files, {size}, all checksums match")


@app.command("diff")
def diff_command(first: Path_, second: Path_, as_json: AsJson = False) -> None:
    """Compare two checkpoints tensor by tensor. Exits with 1 if they differ at all.

    Example: vitpar checkpoint diff runs/one runs/other
    """
    from vitpar.checkpoint.reader import differences

    one, other = _opened(first), _opened(second)
    changed = changes(*(read_recipe(checkpoint.path / RECIPE) for checkpoint in (one, other)))
    total = len(one.index.tensors | other.index.tensors)
    console = Console(stderr=True)
    compared = [*track(differences(one, other), "comparing", total=total, console=console, transient=True)]
    apart = [d for d in compared if d.largest is None or d.largest != 0]
    if as_json:
        rows = [{"name": d.name, "largest": d.largest, "magnitude": d.magnitude} for d in apart]
        steps = [checkpoint.facts.step for checkpoint in (one, other)]
        print_json({"steps": steps, "recipe": list(changed.values()), "tensors": len(compared), "apart": rows})
    else:
        for words in changed.values():
            typer.echo(words)
        typer.echo(f"{len(apart):,} of {len(compared):,} tensors differ")
        table = data_table("tensor", "largest difference", "largest value")
        for d in sorted(apart, key=lambda d: -(d.largest if d.largest is not None else float("inf")))[:_WORST]:
            if d.largest is None or d.magnitude is None:
                table.add_row(d.name, "missing in one, or different shapes", "")
            else:
                table.add_row(d.name, f"{d.largest:.2e}", f"{d.magnitude:.2e}")
        if apart:
            Console().print(table)
    if apart or changed:
        raise typer.Exit(1)


@app.command("export")
def export_command(
    path: Path_,
    out: Out,
    format: ExportFormat = typer.Option("vitpar", "--format", help="Names and files of this library."),
    shard_size: str | None = typer.Option(
        None, "--shard-size", metavar="SIZE", help="Maximum size of a file, such as 500MB.  \\[default: 5GB]"
    ),
    plain: bool = typer.Option(False, "--no-averages", help="Export the parameters instead of their running averages."),
    adapters: bool = typer.Option(
        False, "--adapters", help="Export the low-rank adapters (LoRA) alone, as files of peft for the library."
    ),
) -> None:
    """Write the parameters of a checkpoint for vitpar, timm or transformers as safetensors, or the model as ONNX.

    Folders of weights, such as a run's `weights` or those of `vitpar checkpoint import`, are exported too.

    timm reads the folder with timm.create_model("local-dir:FOLDER", pretrained=True), transformers with
    from_pretrained("FOLDER").

    Example: vitpar checkpoint export runs/mine --format timm --out weights/mine
    """
    from vitpar.weights.exporting import export_weights
    from vitpar.weights.folder import INDEX, export, open_weights

    _refuse_missing(path)
    saved = (path / INDEX).is_file()
    for wrong, sentence in (
        (adapters and format == "onnx", "--format onnx has no effect with --adapters: leave it out"),
        (adapters and shard_size, "--shard-size has no effect with --adapters: leave it out"),
        (
            adapters and saved,
            f"'{path}' holds weights, into which adapters are merged: name the run or a checkpoint",
        ),
        (saved and format == "vitpar", f"'{path}' holds weights of vitpar already: name a library with --format"),
        (saved and plain, f"--no-averages has no effect: '{path}' has one set of parameters"),
        (
            shard_size and format in ("timm", "onnx"),
            f"--shard-size has no effect with --format {format}: leave it out",
        ),
    ):
        if wrong:
            raise CheckpointError(sentence)
    checkpoint = None if saved else _opened(path)
    averages, shard_bytes = False if plain else None, int(parse_size(shard_size or "5GB", "--shard-size"))
    what = str(path) if checkpoint is None else f"step {checkpoint.facts.step:,}"
    weights = open_weights(path if checkpoint is None else checkpoint.path, averages, merge=not adapters)
    notes: list[str] = []
    with progress_bar("writing") as moved:
        if adapters:
            if not isinstance(config := weights.config, LoRA):
                raise CheckpointError(f"'{path}' has no adapters: only runs with [lora] have them")
            files = _export_adapters(weights, config, out, format)
            what = f"adapters of {count(len(config.modules), 'linear layer')} at {what}"
        elif format == "vitpar":
            assert checkpoint is not None
            files = export(checkpoint, out, shard_bytes=shard_bytes, averages=averages, progress=moved)
        elif format == "onnx":
            from vitpar.weights.exporting import ONNX, export_onnx

            error = export_onnx(weights, out)
            files, notes = [out / ONNX], [f"ONNX Runtime's logits differ from torch's by {error:.1e} of the largest"]
        else:
            files, notes = export_weights(weights, out, format, shard_bytes=shard_bytes, progress=moved)
    typer.echo(f"{what} written to {out}: {count(len(files), 'file')}")
    for note in notes:
        say(f"  {note}", indent=4)


def _export_adapters(weights: "Weights", config: LoRA, out: Path, format: ExportFormat) -> list[Path]:
    """Write the adapters of a checkpoint as files of peft, and return them."""
    from vitpar.weights.adapters import adapter_files
    from vitpar.weights.folder import write_files

    trained = {*parameter_names(config.whole)} - read_recipe(weights.folder / RECIPE).frozen(config)
    library = format if format == "timm" or format == "transformers" else None
    return write_files(out, adapter_files(config, weights.read, trained, library))


@app.command("import")
def import_command(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="FILE|FOLDER", help="Downloaded model folder, .safetensors or .pth file, or hf:OWNER/NAME."
        ),
    ],
    out: Out,
    model: str | None = typer.Option(
        None, "--model", metavar="NAME", help="timm model name, needed if no config.json gives the number of heads."
    ),
    classes: int | None = typer.Option(
        None, "--classes", min=1, help="Number of classes; a different number gives a new classifier."
    ),
    image_size: int | None = typer.Option(
        None, "--image-size", min=1, help="Interpolate positions for images of this size in pixels."
    ),
    trust: bool = typer.Option(
        False, "--trust", help="Load a .pth or .bin with more than tensors, which runs code from it."
    ),
    prefix: str | None = typer.Option(
        None,
        "--prefix",
        help="Beginning of the names of the model's tensors, such as teacher.backbone.  \\[default: found]",
    ),
    adapters: Path | None = typer.Option(
        None, "--adapters", metavar="DIR", help="Merge the low-rank adapters (LoRA) that peft saved there."
    ),
    shard_size: str = typer.Option(
        "5GB", "--shard-size", metavar="SIZE", help="Maximum size of a file, such as 500MB or 5GB."
    ),
    as_json: AsJson = False,
) -> None:
    """Import weights of timm's or transformers' ViTs for `vitpar eval` and `vitpar train --weights`.

    The source is a model's folder, a safetensors file or a state dict; or a repository on the Hugging Face hub, of
    which only safetensors are read.

    Example: vitpar checkpoint import downloads/vit-base-patch16-224 --out weights/base

    Example: vitpar checkpoint import hf:google/vit-base-patch16-224 --out weights/base
    """
    from vitpar.weights.hub import fetch, hub_name

    if name := hub_name(str(source)):
        source = fetch(name)
    from vitpar.weights.importing import import_weights

    if trust:
        warn(f"'{source}' is trusted: if it is a pickle, code from it runs now")
    with progress_bar("importing") as moved:
        done = import_weights(
            source,
            out,
            model=model,
            classes=classes,
            image_size=image_size,
            trust=trust,
            prefix=prefix,
            adapters=adapters,
            shard_bytes=int(parse_size(shard_size, "--shard-size")),
            progress=moved,
        )
    c = done.config
    if as_json:
        files = [str(path) for path in done.files]
        config = config_to_json(c)
        print_json({"format": done.format, "config": config, "files": files, "notes": done.notes})
        return
    typer.echo(
        f"{out}: from {done.format}'s names, {c.num_blocks} blocks, {c.parameters / 1e6:,.2f} M parameters, "
        f"{', '.join(c.words)}"
    )
    for note in done.notes:
        say(f"  {note}", indent=4)
    use = "train --weights" if done.new_classifier else "eval --checkpoint"
    typer.echo(f"vitpar {use} {shlex.quote(str(out))} --data DIR")
