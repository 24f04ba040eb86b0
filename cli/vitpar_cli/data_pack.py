"""`vitpar data pack`: pack images or text into shards."""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from vitpar.errors import DataError
from vitpar_cli.data_view import Workers, refuse_options
from vitpar_cli.packing import pack_images, pack_text

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
