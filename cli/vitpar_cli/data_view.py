"""Views of `vitpar data`: surveys of data sets, and their problems."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.filesize import decimal
from rich.markup import escape

from vitpar.data.survey import survey
from vitpar.errors import DataError
from vitpar.text import count, printable, shown
from vitpar_cli.outputs import data_table

BAR = 20
"""Characters in the bar of the largest class."""
Workers = Annotated[int | None, typer.Option(min=1, help="Threads.  \\[default: one per core]")]
CLASSES_SHOWN = 20
"""Maximum rows in the table of classes; a longer table would hide the rest of the output."""


def refuse_options(given: Mapping[str, object], names: Sequence[str], reason: str) -> None:
    """Raise DataError if one of the options `names` was given.

    given: values of the options that were given, by name of the parameter.
    reason: what the options are for, to complete "--option …".
    """
    if (wrong := next((name for name in names if name in given), None)) is not None:
        raise DataError(f"--{wrong.replace('_', '-')} {reason}")


def print_survey(folder: Path, content: dict[str, Any] | None = None) -> None:
    """Print the survey of a data set. content: the survey if it is there already."""
    if content is None:
        content = survey(folder)
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
