"""`vitpar data`: pack images or text into shards, index and verify shards, and describe their content."""

import json
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console
from rich.filesize import decimal
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from vitpar.data.classes import class_names
from vitpar.data.shards.manifest import read_manifest
from vitpar.errors import DataError
from vitpar.io import read_bytes
from vitpar.launch.resources import cpu_cores
from vitpar.limits import MAX_JSON_BYTES
from vitpar.terminal import say
from vitpar.text import count, printable, shown
from vitpar.training.recipe.request import RecipeRequest
from vitpar_cli.data_text import pack_text_command, print_text_survey, refuse_options
from vitpar_cli.outputs import data_table, refuse_unwritable, warn
from vitpar_cli.recipe_options import Assignments, RecipeFile

if TYPE_CHECKING:
    from vitpar.data.survey import Survey
    from vitpar.training.recipe import Recipe

app = typer.Typer(
    no_args_is_help=True,
    help="Pack images or text into shards, index and verify shards, and say what they hold.\n\n"
    "Example: vitpar data pack digits data_shards/digits",
    short_help="Pack images or text into shards, index and verify shards, and say what they hold.",
)

SHOWN_ALWAYS = 1000
"""Total below which the progress bar moves with every item, and not with every 100th item."""
BAR = 20
"""Characters in the bar of the largest class."""
CLASSES_SHOWN = 20
"""Maximum rows in the table of classes; a longer table would hide the rest of the output."""


@contextmanager
def packing_progress() -> Iterator[Callable[[str, int, int], None]]:
    """Show a progress bar for every split on stderr, and yield the callback that moves them."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        tasks: dict[str, TaskID] = {}

        def report(split: str, done: int, total: int) -> None:
            if split not in tasks:
                tasks[split] = bar.add_task(split, total=total)
            if done % 100 == 0 or done == total or total < SHOWN_ALWAYS:
                bar.update(tasks[split], completed=done)

        yield report


Workers = Annotated[int | None, typer.Option(min=1, help="Threads.  \\[default: one per core]")]
Folder = Annotated[Path, typer.Argument(metavar="DIR", help="Folder with shards and their index.")]


@app.command("pack")
def pack_command(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SRC",
            help="A folder with train/CLASS/ and val/CLASS/, or with CLASS/ alone; a folder with ImageNet's archives "
            "(ILSVRC2012_img_train.tar, ILSVRC2012_img_val.tar and the devkit), with train.zip, val.zip, train_map.txt "
            "and val_map.txt, with TFRecords, or with Hugging Face's Parquet files; an archive of "
            "CIFAR-10 or CIFAR-100; a CSV list with the columns path and label; or the word `digits`. "
            "With --tokens: a .txt, .jsonl or .parquet file of text, or a folder of these.",
        ),
    ],
    destination: Annotated[Path | None, typer.Argument(metavar="DST", help="Folder to create.")] = None,
    val_fraction: Annotated[
        float | None,
        typer.Option(
            help="Fraction of each class used as `val` if SRC has no val split; 0: none, runs do not evaluate.  "
            "\\[default: 0.2; text: 0.05]",
        ),
    ] = None,
    shard_samples: Annotated[
        int | None, typer.Option(help="Images or sequences per shard.  \\[default: 5000; text: 50000]")
    ] = None,
    short_side: Annotated[
        int | None,
        typer.Option(help="Resize larger images to this shorter side, as JPEG.  \\[default: unchanged]"),
    ] = None,
    quality: Annotated[
        int | None, typer.Option(help="JPEG quality with --short-side, 1 to 100.  \\[default: 90]")
    ] = None,
    seed: Annotated[
        int, typer.Option(min=0, max=2**63 - 1, help="Seed of the split and of the order of images in shards.")
    ] = 0,
    workers: Workers = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the data set in DST.")] = False,
    skip_damaged: Annotated[
        bool,
        typer.Option(
            "--skip-damaged", help="Leave out files that are damaged or no images; list them in DST/skipped.txt."
        ),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only print what was found in SRC: splits, classes, and what is left out.")
    ] = False,
    no_decode: Annotated[
        bool, typer.Option("--no-decode", help="Skip the search for damaged images, which decodes each.")
    ] = False,
    tokens: Annotated[
        int | None, typer.Option(min=1, help="Pack text, in sequences of at most this many tokens.")
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(metavar="bytes|FILE", help="Tokenizer of text: bytes or a tokenizer.json.  \\[default: bytes]"),
    ] = None,
    documents: Annotated[
        Literal["file", "paragraph", "line"] | None,
        typer.Option(help="Content of a document of a .txt file.  \\[default: file]"),
    ] = None,
    field: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Field or column with the text in .jsonl and .parquet.  \\[default: text]"),
    ] = None,
    cross_documents: Annotated[
        bool, typer.Option("--cross-documents", help="Let sequences of text continue over the ends of documents.")
    ] = False,
) -> None:
    """Pack images, or with --tokens text, into WebDataset shards and write an index of them.

    Images are not re-encoded unless --short-side is given. An interrupted command continues where it stopped when it is
    run again.

    Example: vitpar data pack digits data_shards/digits

    Example: vitpar data pack photos --dry-run

    Example: vitpar data pack corpus.txt data_shards/corpus --tokens 128
    """
    of_text = {"--tokenizer": tokenizer, "--documents": documents, "--field": field}
    if tokens is None:
        refuse_options(of_text | {"--cross-documents": cross_documents}, "is for text: add --tokens N, or leave it out")
    else:
        of_images = {"--short-side": short_side, "--quality": quality, "--skip-damaged": skip_damaged}
        refuse_options(of_images | {"--no-decode": no_decode}, "is for images: leave it out, or --tokens")
        refuse_options({"--workers": workers}, "is for images, since tokenizers use all cores: set RAYON_NUM_THREADS")
        pack_text_command(
            source,
            destination,
            tokens,
            tokenizer=tokenizer,
            documents=documents,
            field=field,
            cross_documents=cross_documents,
            val_fraction=val_fraction,
            shard_samples=shard_samples,
            seed=seed,
            overwrite=overwrite,
            dry_run=dry_run,
            progress=packing_progress,
        )
        return
    from vitpar.data.shards.pack import SHARD_SAMPLES, SKIPPED, Reencode, pack
    from vitpar.data.sources import Source, open_source
    from vitpar.data.survey import survey

    def print_contents(contents: Source) -> None:
        for line in contents.describe(source):
            say(printable(line))

    if dry_run:
        with packing_progress() as progress:
            contents = open_source(source, val_fraction=val_fraction, seed=seed, progress=progress)
        print_contents(contents)
        return
    if destination is None:
        raise DataError("DST is missing: name the folder to create, or use --dry-run")
    if quality is not None and short_side is None:
        raise DataError(f"--quality {quality} requires --short-side: add it, or leave --quality out")
    with packing_progress() as progress:
        pack(
            source,
            destination,
            val_fraction=val_fraction,
            shard_samples=SHARD_SAMPLES if shard_samples is None else shard_samples,
            reencode=None if short_side is None else Reencode(short_side, 90 if quality is None else quality),
            seed=seed,
            overwrite=overwrite,
            workers=workers or cpu_cores(),
            progress=progress,
            skip_damaged=skip_damaged,
            decode_images=not no_decode,
            opened=print_contents,
        )
    _print_survey(survey(destination))
    typer.echo(f"train      {shlex.join(['vitpar', 'train', '--data', str(destination)])}")
    listing = destination / SKIPPED
    if listing.exists():
        skipped = listing.read_text().splitlines()
        warn(f"{count(len(skipped), 'image')} left out, listed in '{listing}'; the first: {printable(skipped[0])}")


@app.command("index")
def index_command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder with the .tar files.")],
    split: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=PATTERN",
            help="Files of a split, such as train=imagenet-*.tar; repeatable.  \\[default: by train, val and test in "
            "file names]",
        ),
    ] = None,
    label: Annotated[
        str,
        typer.Option(
            metavar="cls|json:FIELD|folder", help="Source of labels: .cls or .json files of the images, or folders."
        ),
    ] = "cls",
    classes: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Class names, one per line, in label order.")
    ] = None,
    workers: Workers = None,
) -> None:
    """Write an index into a folder of existing WebDataset shards, which are not changed.

    Example: vitpar data index data_shards/imagenet-wds --label json:class
    """
    from vitpar.data.shards.index import Labels, index
    from vitpar.data.survey import survey

    labels = Labels.parse(label)
    pairs = [text.partition("=") for text in split or ()]
    wrong = next(
        (text for text, (name, _, pattern) in zip(split or (), pairs, strict=True) if not (name and pattern)), None
    )
    if wrong is not None:
        raise DataError(f"'{wrong}' is not a split: write NAME=PATTERN, such as train=imagenet-*.tar")
    with packing_progress() as progress:
        index(
            folder,
            splits={name: pattern for name, _, pattern in pairs} or None,
            labels=labels,
            classes=None if classes is None else _lines(classes),
            workers=workers or cpu_cores(),
            progress=progress,
        )
    _print_survey(survey(folder))


@app.command("verify")
def verify_command(
    folder: Folder,
    pixels: Annotated[bool, typer.Option("--pixels/--no-pixels", help="Also decode every image.")] = True,
    workers: Workers = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Read a data set completely and print every damaged shard and sample.

    Reports each shard that is no sound tar file, and each sample that differs from its index or cannot be decoded.
    Exits with 1 if there are any.

    Example: vitpar data verify data_shards/digits
    """
    from vitpar.data.shards.verify import verify

    with packing_progress() as progress:
        problems = list(verify(folder, pixels=pixels, workers=workers or cpu_cores(), progress=progress))
    if as_json:
        typer.echo(json.dumps({"folder": str(folder), "bad": [asdict(problem) for problem in problems]}))
    else:
        for problem in problems:
            number = "" if problem.sample is None else f"{problem.sample:,} "
            say(printable(f"{problem.split} {number}{problem.name}: {problem.what}"))
        typer.echo(f"{count(len(problems), 'problem')} in '{folder}'" if problems else f"'{folder}' is complete")
    if problems:
        raise typer.Exit(1)


def _lines(path: Path) -> list[str]:
    try:
        return class_names(read_bytes(path, MAX_JSON_BYTES))
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read the classes in '{path}': {error}") from None


@app.command("info")
def info_command(
    folder: Folder,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    preview: Annotated[
        Path | None, typer.Option("--preview", metavar="FILE.png", help="Draw samples as the recipe augments them.")
    ] = None,
    recipe: RecipeFile = None,
    assignments: Assignments = None,
) -> None:
    """Show the content of a data set: splits, samples, shards, bytes, image sizes and classes.

    Of text: documents, sequences, tokens, their mean number, and the first sequences of each split.

    Example: vitpar data info data_shards/digits --preview digits.png --set augment.policy=rand-m9-n2
    """
    text = read_manifest(folder).text  # refuses before torch is imported, which takes seconds
    if text is not None:
        given = {"--preview": preview, "--recipe": recipe, "--set": assignments or None}
        refuse_options(given, f"is for images, but '{folder}' holds text: leave it out")
        from vitpar.data.text.survey import text_survey

        content_of_text = text_survey(folder)
        typer.echo(json.dumps(content_of_text)) if as_json else print_text_survey(content_of_text)
        return
    from vitpar.data.survey import survey

    if preview is None and (recipe is not None or assignments):
        raise DataError("--recipe and --set do nothing without --preview: add --preview FILE.png, or leave them out")
    refuse_unwritable(preview)
    content = survey(folder)
    if preview is not None:
        _draw(
            folder,
            preview,
            RecipeRequest(recipe, {"data.path": str(folder)}, assignments or ()).read_with_defaults().recipe,
        )
    if as_json:
        typer.echo(json.dumps(content))
    else:
        _print_survey(content)
        if preview is not None:
            typer.echo(f"written    {preview}")


def _draw(folder: Path, path: Path, recipe: "Recipe") -> None:
    """Write the contact sheet of the training split to a PNG file.

    path: the file.
    """
    from vitpar.data.contact_sheet import contact_sheet
    from vitpar.data.shards.shard_set import ShardSet
    from vitpar.tasks.image_data import mixing, order_of, transforms

    shards = ShardSet.open(folder, "train")
    train, evaluated, _ = transforms(recipe, recipe.config(len(shards.classes)).image_size)
    contact_sheet(shards, evaluated, train, mixing(recipe), order_of(recipe, len(shards))).save(path, "PNG")


def _print_survey(content: "Survey") -> None:
    console = Console()
    splits = content["splits"]
    console.print(content["folder"], markup=False, soft_wrap=True)
    table = data_table("split", "samples", "shards", "size", "width", "height", "kB/image")
    for name, split in splits.items():
        spans = (_span(split["width"]), _span(split["height"]), _span([size / 1e3 for size in split["image_bytes"]]))
        counts = (f"{split['samples']:,}", str(split["shards"]), decimal(split["bytes"]))
        table.add_row(_name(name), *counts, *spans)
    console.print(table)
    console.print("minimum (quartiles) maximum, of images sampled from each split", style="dim")
    first = next(iter(splits.values()))["per_class"]
    classes = data_table("label", "class", *splits, "")
    names = content["class_names"] or content["classes"]
    for label, name in enumerate(names[:CLASSES_SHOWN]):
        bar = "█" * round(BAR * first[label] / max(1, *first))
        samples = (f"{split['per_class'][label]:,}" for split in splits.values())
        classes.add_row(str(label), _name(name), *samples, bar)
    console.print(classes)
    hidden = len(content["classes"]) - CLASSES_SHOWN
    if hidden > 0:
        low, high = (pick(range(len(first)), key=first.__getitem__) for pick in (min, max))
        console.print(f"and {hidden:,} more classes; --json lists them all", markup=False)
        words = (f"{_name(names[label])} ({first[label]:,})" for label in (low, high))
        console.print("samples per class: from {} to {}".format(*words))


def _name(name: str) -> str:
    """Return a name from a data set, shortened and escaped so that Rich prints it as plain text."""
    return escape(shown(printable(name)))


def _span(numbers: Sequence[float]) -> str:
    """Return [minimum, three quartiles, maximum] as short text."""
    low, *middle, high = (f"{number:,.0f}" if number >= 10 else f"{number:.2g}" for number in numbers)
    return low if low == high else f"{low} ({' '.join(middle)}) {high}"
