"""`vitpar data` and `vitpar copy`: pack, index, verify and describe data sets; copy them to and from object storage."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.filesize import decimal
from rich.markup import escape

from vitpar.copying import download, upload
from vitpar.data.shards.index import Labels, index
from vitpar.data.shards.manifest import read_manifest
from vitpar.data.shards.pack import SKIPPED
from vitpar.data.shards.verify import verify
from vitpar.data.sources.source import read_class_names
from vitpar.data.survey import survey
from vitpar.errors import DataError
from vitpar.launch.resources import cpu_cores
from vitpar.object_store import ObjectPath, parse_place
from vitpar.recipe.request import RecipeRequest
from vitpar.tasks.data import write_preview
from vitpar.terminal import say
from vitpar.text import count, printable, shown
from vitpar_cli.data_pack import pack_images, pack_text, packing_progress
from vitpar_cli.outputs import data_table, print_json, progress_bar, refuse_unwritable, warn
from vitpar_cli.recipe_options import AsJson, Assignments, RecipeFile

BAR = 20
"""Characters in the bar of the largest class."""
Workers = Annotated[int | None, typer.Option(min=1, help="Threads.  \\[default: one per core]")]
CLASSES_SHOWN = 20
"""Maximum rows in the table of classes; a longer table would hide the rest of the output."""
ABOUT = "Pack images or text into shards, index and verify shards, and say what they hold."
EXAMPLE = "Example: vitpar data pack digits data_shards/digits"
app = typer.Typer(no_args_is_help=True, help=f"{ABOUT}\n\n{EXAMPLE}", short_help=ABOUT)
Folder = Annotated[Path, typer.Argument(metavar="DIR", help="Folder with shards and their index.")]
SPLIT = "Files of a split, such as train=imagenet-*.tar; repeatable.  \\[default: by train, val and test in file names]"
LABEL = "Source of labels: .cls or .json files of the images, or folders."
OF_TEXT = ("tokenizer", "documents", "field", "cross_documents")
OF_IMAGES = ("short_side", "quality", "skip_damaged", "no_decode", "workers")
OPTIONS: dict[str, str] = {
    "source": "A folder with train/CLASS/ and val/CLASS/, or with CLASS/ alone; a folder with ImageNet's archives "
    "(ILSVRC2012_img_train.tar, ILSVRC2012_img_val.tar and the devkit), with train.zip, val.zip, train_map.txt "
    "and val_map.txt, or with Hugging Face's Parquet files; an archive of CIFAR-10 or CIFAR-100; a CSV list with the "
    "columns path and label; or the word `digits`. "
    "With --tokens: a .txt, .jsonl or .parquet file of text, or a folder of these.",
    "val_fraction": "Fraction of each class used as `val` if SRC has no val split; 0: none, runs do not evaluate.  "
    "\\[default: 0.2; text: 0.05]",
    "shard_samples": "Images or sequences per shard.  \\[default: 5000; text: 50000]",
    "short_side": "Resize larger images to this shorter side, as JPEG.  \\[default: unchanged]",
    "quality": "JPEG quality with --short-side, 1 to 100.  \\[default: 90]",
    "seed": "Seed of the split and of the order of images in shards.",
    "skip_damaged": "Leave out files that are damaged or no images; list them in DST/skipped.txt.",
    "dry_run": "Only print what was found in SRC: splits, classes, and what is left out.",
    "no_decode": "Skip the search for damaged images, which decodes each.",
    "tokens": "Pack text, in sequences of at most this many tokens.",
    "tokenizer": "Tokenizer of text: bytes or a tokenizer.json.  \\[default: bytes]",
    "documents": "Content of a document of a .txt file.  \\[default: file]",
    "field": "Field or column with the text in .jsonl and .parquet.  \\[default: text]",
    "cross_documents": "Let sequences of text continue over the ends of documents.",
}
"""Help of the options."""


def option(name: str, *flags: str, **settings: Any) -> Any:
    """Return the option of a parameter with its help."""
    return typer.Option(*flags, help=OPTIONS[name], **settings)


@app.command("pack")
def pack_command(
    source: Annotated[str, typer.Argument(metavar="SRC", help=OPTIONS["source"])],
    destination: Path | None = typer.Argument(None, metavar="DST", help="Folder to create."),
    val_fraction: Annotated[float | None, option("val_fraction")] = None,
    shard_samples: Annotated[int | None, option("shard_samples")] = None,
    short_side: Annotated[int | None, option("short_side")] = None,
    quality: Annotated[int | None, option("quality")] = None,
    seed: Annotated[int, option("seed", min=0, max=2**63 - 1)] = 0,
    workers: Workers = None,
    overwrite: bool = typer.Option(False, "--overwrite", help="Replace the data set in DST."),
    skip_damaged: Annotated[bool, option("skip_damaged", "--skip-damaged")] = False,
    dry_run: Annotated[bool, option("dry_run", "--dry-run")] = False,
    no_decode: Annotated[bool, option("no_decode", "--no-decode")] = False,
    tokens: Annotated[int | None, option("tokens", min=1)] = None,
    tokenizer: Annotated[str | None, option("tokenizer", metavar="bytes|FILE")] = None,
    documents: Annotated[Literal["file", "paragraph", "line"] | None, option("documents")] = None,
    field: Annotated[str | None, option("field", metavar="NAME")] = None,
    cross_documents: Annotated[bool, option("cross_documents", "--cross-documents")] = False,
) -> None:
    """Pack images, or with --tokens text, into WebDataset shards and write an index of them.

    Images are not re-encoded unless --short-side is given. An interrupted command continues where it stopped when it is
    run again.

    Example: vitpar data pack digits data_shards/digits

    Example: vitpar data pack photos --dry-run

    Example: vitpar data pack corpus.txt data_shards/corpus --tokens 128
    """
    given = {name: value for name, value in locals().items() if value is not None and value is not False}
    if tokens is None:
        refuse_options(given, OF_TEXT, "is for text: add --tokens N, or leave it out")
    else:
        refuse_options(given, OF_IMAGES, "is for images: leave it out, or --tokens")
    if destination is None and not dry_run:
        raise DataError("DST is missing: name the folder to create, or use --dry-run")
    if quality is not None and short_side is None:
        raise DataError(f"--quality {quality} requires --short-side: add it, or leave --quality out")
    (pack_images if tokens is None else pack_text)(**given)
    if destination is None or dry_run:
        return
    print_survey(survey(destination))
    if tokens is None:
        typer.echo(f"train      {shlex.join(['vitpar', 'train', '--data', str(destination)])}")
        listing = destination / SKIPPED
        if listing.exists():
            skipped = listing.read_text().splitlines()
            warn(f"{count(len(skipped), 'image')} left out, listed in '{listing}'; the first: {printable(skipped[0])}")


@app.command("index")
def index_command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder with the .tar files.")],
    split: list[str] | None = typer.Option(None, metavar="NAME=PATTERN", help=SPLIT),
    label: str = typer.Option("cls", metavar="cls|json:FIELD|folder", help=LABEL),
    classes: Path | None = typer.Option(None, metavar="FILE", help="Class names, one per line, in label order."),
    workers: Workers = None,
) -> None:
    """Write an index into a folder of existing WebDataset shards, which are not changed.

    Example: vitpar data index data_shards/imagenet-wds --label json:class
    """
    labels = Labels.parse(label)
    pairs = [text.partition("=") for text in split or ()]
    if (wrong := next((pair for pair in pairs if not all(pair)), None)) is not None:
        raise DataError(f"'{''.join(wrong)}' is not a split: write NAME=PATTERN, such as train=imagenet-*.tar")
    names = None if classes is None else read_class_names(classes)
    splits = {name: pattern for name, _, pattern in pairs} or None
    with packing_progress() as progress:
        index(folder, splits=splits, labels=labels, classes=names, workers=workers or cpu_cores(), progress=progress)
    print_survey(survey(folder))


@app.command("verify")
def verify_command(
    folder: Folder,
    pixels: bool = typer.Option(True, "--pixels/--no-pixels", help="Also decode every image."),
    workers: Workers = None,
    as_json: AsJson = False,
) -> None:
    """Read a data set completely and print every damaged shard and sample.

    Reports each shard that is no sound tar file, and each sample that differs from its index or cannot be decoded.
    Exits with 1 if there are any.

    Example: vitpar data verify data_shards/digits
    """
    with packing_progress() as progress:
        problems = list(verify(folder, pixels=pixels, workers=workers or cpu_cores(), progress=progress))
    if as_json:
        print_json({"folder": str(folder), "bad": [asdict(problem) for problem in problems]})
    else:
        for problem in problems:
            number = "" if problem.sample is None else f"{problem.sample:,} "
            say(printable(f"{problem.split} {number}{problem.name}: {problem.what}"))
        typer.echo(f"{count(len(problems), 'problem')} in '{folder}'" if problems else f"'{folder}' is complete")
    if problems:
        raise typer.Exit(1)


@app.command("info")
def info_command(
    folder: Folder,
    as_json: AsJson = False,
    preview: Path | None = typer.Option(
        None, "--preview", metavar="FILE.png", help="Draw samples as the recipe augments them."
    ),
    recipe: RecipeFile = None,
    assignments: Assignments = None,
) -> None:
    """Show the content of a data set: splits, samples, shards, bytes, image sizes and classes.

    Of text: documents, sequences, tokens, their mean number, and the first sequences of each split.

    Example: vitpar data info data_shards/digits --preview digits.png --set augment.policy=rand-m9-n2
    """
    given = {"preview": preview, "recipe": recipe, "set": assignments or None}
    given = {name: value for name, value in given.items() if value is not None}
    if read_manifest(folder).text is not None:  # refuses before torch is imported, which takes seconds
        refuse_options(given, [*given], f"is for images, but '{folder}' holds text: leave it out")
    if given and preview is None:
        raise DataError("--recipe and --set do nothing without --preview: add --preview FILE.png, or leave them out")
    refuse_unwritable(preview)
    content = survey(folder)
    if preview is not None:
        request = RecipeRequest(recipe, {"data.path": str(folder)}, assignments or ())
        write_preview(request.read_with_defaults().recipe, preview)
    if as_json:
        print_json(content)
        return
    print_survey(content)
    if preview is not None:
        typer.echo(f"written    {preview}")


def refuse_options(given: Mapping[str, object], names: Sequence[str], reason: str) -> None:
    """Raise DataError if one of the options `names` was given.

    given: values of the options that were given, by name of the parameter.
    reason: what the options are for, to complete "--option …".
    """
    if (wrong := next((name for name in names if name in given), None)) is not None:
        raise DataError(f"--{wrong.replace('_', '-')} {reason}")


def print_survey(content: dict[str, Any]) -> None:
    """Print the survey of a data set."""
    console = Console()
    console.print(content["folder"], markup=False, soft_wrap=True)
    (_print_images if "classes" in content else _print_text)(console, content)


def _print_images(console: Console, content: dict[str, Any]) -> None:
    splits = content["splits"]
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


def _print_text(console: Console, content: dict[str, Any]) -> None:
    words = f"tokenizer {content['tokenizer']} of {count(content['vocab_size'], 'token')}"
    across = ", across documents" * content["cross_documents"]
    line = f"text: {words}, sequences of at most {content['tokens']:,} tokens{across}"
    console.print(line, markup=False, soft_wrap=True)
    table = data_table("split", "documents", "sequences", "tokens", "mean length", "shards", "size")
    for name, split in content["splits"].items():
        counts = (f"{split['documents']:,}", f"{split['samples']:,}", f"{split['ids']:,}")
        sizes = (f"{split['mean_length']:,.1f}", f"{split['shards']:,}", decimal(split["bytes"]))
        table.add_row(_name(name), *counts, *sizes)
    console.print(table)
    found = [f"{name} {number}" for name, number in content["specials"].items() if isinstance(number, int)]
    if sentinels := content["specials"]["sentinels"]:
        found.append(count(len(sentinels), "sentinel"))
    console.print(f"special tokens: {', '.join(found) or 'none'}", markup=False, soft_wrap=True)
    for name, split in content["splits"].items():
        for text in split["decoded"]:
            line = printable(text.replace("\n", "⏎"))
            console.print(f"{name}: {shown(line)}", markup=False, highlight=False, soft_wrap=True)


def _name(name: str) -> str:
    """Return a name from a data set, shortened and escaped so that Rich prints it as plain text."""
    return escape(shown(printable(name)))


def _span(numbers: Sequence[float]) -> str:
    """Return [minimum, three quartiles, maximum] as short text."""
    low, *middle, high = (f"{number:,.0f}" if number >= 10 else f"{number:.2g}" for number in numbers)
    return low if low == high else f"{low} ({' '.join(middle)}) {high}"


def copy(
    source: Annotated[str, typer.Argument(metavar="SRC", help="Folder, or s3://BUCKET/FOLDER.")],
    target: Annotated[str, typer.Argument(metavar="DST", help="The other: s3://BUCKET/FOLDER, or a new folder.")],
) -> None:
    """Copy a data set, a run, a checkpoint or weights to object storage (S3), or back.

    A copy does not look complete before it is. Copies on a disk are verified: checkpoints by their checksums, data by
    its index. Credentials and endpoint come from the environment (AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL, …).

    Example: vitpar copy data_shards/mine s3://bucket/mine
    """
    begin, end = parse_place(source), parse_place(target)
    with progress_bar("copying") as bar:
        if isinstance(begin, Path) and isinstance(end, ObjectPath):
            if not begin.is_dir():
                raise DataError(f"there is no folder '{source}': name the folder of a data set, a run or weights")
            files = upload(begin, end, bar)
        elif isinstance(begin, ObjectPath) and isinstance(end, Path):
            files = download(begin, end, bar)
        else:
            raise DataError(f"one of '{source}' and '{target}' must be s3://BUCKET/FOLDER, and the other a folder")
    typer.echo(f"copied {count(files, 'file')} to {end}")
