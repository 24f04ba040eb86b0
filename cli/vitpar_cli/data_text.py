"""Text in `vitpar data`: pack it, and describe packed text."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.filesize import decimal
from rich.markup import escape

from vitpar.errors import DataError
from vitpar.terminal import say
from vitpar.text import count, printable, shown
from vitpar_cli.outputs import data_table

if TYPE_CHECKING:
    from vitpar.data.text.sources import Documents, TextSource
    from vitpar.data.text.survey import TextSurvey
    from vitpar.data.text.tokenizer import Tokenizer

Progress = Callable[[], AbstractContextManager[Callable[[str, int, int], None]]]


def refuse_options(options: Mapping[str, object], reason: str) -> None:
    """Raise DataError if one of `options` was given.

    options: values by the names of options; None and False for one that was not given.
    reason: what the options are for, to complete "--option …".
    """
    given = next((name for name, value in options.items() if value is not None and value is not False), None)
    if given is not None:
        raise DataError(f"{given} {reason}")


def pack_text_command(
    source: str,
    destination: Path | None,
    tokens: int,
    *,
    tokenizer: str | None,
    documents: "Documents | None",
    field: str | None,
    cross_documents: bool,
    val_fraction: float | None,
    shard_samples: int | None,
    seed: int,
    overwrite: bool,
    dry_run: bool,
    progress: Progress,
) -> None:
    """Pack text, or only print what would be packed."""
    from vitpar.data.text.pack import SHARD_SEQUENCES, VAL_FRACTION, open_all, pack_text
    from vitpar.data.text.survey import text_survey

    def print_contents(text: "TextSource", words: "Tokenizer") -> None:
        for line in text.describe():
            say(printable(line))
        fraction = VAL_FRACTION if val_fraction is None else val_fraction
        if "val" not in text.files:
            part = f"{fraction:.0%} of train's documents, or the last of its sequences if there are few documents"
            say(f"  val: {part.replace('%', ' %', 1)}" if fraction else "  no val split: runs do not evaluate")
        name = shown(tokenizer or "bytes")
        say(printable(f"  tokenizer {name}: {count(words.vocab_size, 'token')}, sequences of at most {tokens:,}"))

    chosen = tokenizer or "bytes"
    if dry_run:
        print_contents(*open_all(source, chosen, documents, field, cross_documents, val_fraction))
        return
    if destination is None:
        raise DataError("DST is missing: name the folder to create, or use --dry-run")
    with progress() as report:
        pack_text(
            source,
            destination,
            tokens,
            tokenizer=chosen,
            documents=documents,
            field=field,
            cross_documents=cross_documents,
            val_fraction=val_fraction,
            shard_samples=SHARD_SEQUENCES if shard_samples is None else shard_samples,
            seed=seed,
            overwrite=overwrite,
            progress=report,
            opened=print_contents,
        )
    print_text_survey(text_survey(destination))


def print_text_survey(content: "TextSurvey") -> None:
    """Print the survey of packed text."""
    console = Console()
    console.print(content["folder"], markup=False, soft_wrap=True)
    words = f"tokenizer {content['tokenizer']} of {count(content['vocab_size'], 'token')}"
    across = ", across documents" * content["cross_documents"]
    line = f"text: {words}, sequences of at most {content['tokens']:,} tokens{across}"
    console.print(line, markup=False, soft_wrap=True)
    table = data_table("split", "documents", "sequences", "tokens", "mean length", "shards", "size")
    for name, split in content["splits"].items():
        counts = (f"{split['documents']:,}", f"{split['samples']:,}", f"{split['ids']:,}")
        sizes = (f"{split['mean_length']:,.1f}", f"{split['shards']:,}", decimal(split["bytes"]))
        table.add_row(escape(shown(printable(name))), *counts, *sizes)
    console.print(table)
    found = {name: number for name, number in content["specials"].items() if isinstance(number, int)}
    sentinels = content["specials"].get("sentinels")
    names = [f"{name} {number}" for name, number in found.items()]
    if isinstance(sentinels, list) and sentinels:
        names.append(count(len(sentinels), "sentinel"))
    console.print(f"special tokens: {', '.join(names) or 'none'}", markup=False, soft_wrap=True)
    for name, split in content["splits"].items():
        for text in split["decoded"]:
            line = printable(text.replace("\n", "⏎"))
            console.print(f"{name}: {shown(line)}", markup=False, highlight=False, soft_wrap=True)
