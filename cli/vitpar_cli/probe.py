"""`vitpar probe`: linear classifiers and nearest neighbours on the features that `vitpar features` writes."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from vitpar.errors import RecipeError
from vitpar.launch.resources import choose_device
from vitpar.text import count, shown
from vitpar_cli import recipe_options as o
from vitpar_cli.outputs import data_table, print_json, progress_bar, warn


def _numbers(text: str, kind: type, option: str) -> tuple[Any, ...]:
    """Return the numbers in `a,b,…`. Raises RecipeError for anything else than 1 to 100 numbers above 0."""
    try:
        numbers = tuple(kind(part) for part in text.split(","))
    except ValueError:
        numbers = ()
    if not 0 < len(numbers) <= 100 or not all(0 < number < 1e9 for number in numbers):
        raise RecipeError(f"{option} is '{shown(text)}': give numbers above 0 with commas between them")
    return numbers


def probe(
    train: Annotated[Path, typer.Argument(metavar="TRAIN", help="Features of labelled training images (Parquet).")],
    val: Annotated[Path, typer.Argument(metavar="VAL", help="Features of labelled validation images (Parquet).")],
    rates: str | None = typer.Option(
        None, "--rates", metavar="A,B,…", help="Learning rates, for a batch of 256.  \\[default: DINOv2's 13]"
    ),
    epochs: int = typer.Option(10, "--epochs", min=1, max=10**6, help="Passes over the training images."),
    batch_size: int = typer.Option(1024, "--batch-size", min=1, max=1 << 24, help="Images of a step."),
    weight_decay: float = typer.Option(0.0, "--weight-decay", min=0.0, help="L2 penalty of the weights."),
    standardize: bool = typer.Option(
        False, "--standardize", help="Give features mean 0 and variance 1 first, as in MAE's probe."
    ),
    neighbours: str | None = typer.Option(
        None, "--neighbours", metavar="A,B,…", help="Numbers of nearest neighbours.  \\[default: DINO's]"
    ),
    temperature: float = typer.Option(0.07, "--temperature", min=1e-3, help="Temperature of the votes of neighbours."),
    seed: int = typer.Option(0, "--seed", min=0, help="Seed of initial weights and order."),
    out: Path | None = typer.Option(
        None, "--out", metavar="DIR", help="New folder for the weights with the best classifier."
    ),
    device: o.DeviceName = None,
    as_json: o.AsJson = False,
) -> None:
    """Evaluate a frozen model by its features: linear classifiers for many learning rates, and nearest neighbours.

    TRAIN and VAL are files of `vitpar features`. All classifiers are trained at once, by SGD with momentum 0.9 and half
    a cosine, without augmentation. The best on VAL is marked; its accuracy is therefore slightly optimistic.

    Example: vitpar probe train.parquet val.parquet --out weights/probed
    """
    from vitpar.training.parquet_file import read_features
    from vitpar.training.probe import (
        NEIGHBOURS,
        RATES,
        LinearProbe,
        nearest_neighbours,
        train_classifiers,
        write_classifier,
    )
    from vitpar.weights.folder import refuse_used

    wanted = RATES if rates is None else _numbers(rates, float, "--rates")
    counts = NEIGHBOURS if neighbours is None else _numbers(neighbours, int, "--neighbours")
    if out is not None:
        refuse_used(out)
    chosen = choose_device(device)
    known, asked = read_features(train), read_features(val)
    if known.embeddings.shape[1] != asked.embeddings.shape[1]:
        raise RecipeError(
            f"'{train}' has {known.embeddings.shape[1]} features and '{val}' {asked.embeddings.shape[1]}: extract both "
            "with one model"
        )
    names = known.about.get("classes")
    classes = max(int(known.labels.max()) + 1, int(asked.labels.max()) + 1, len(names or ()))
    if neighbours is not None and max(counts) > len(known.labels):
        raise RecipeError(
            f"--neighbours is '{neighbours}', but '{train}' has {count(len(known.labels), 'image')}: ask for fewer"
        )
    counts = tuple(k for k in counts if k <= len(known.labels))

    import torch

    settings = LinearProbe(wanted, epochs, batch_size, weight_decay, standardize, seed)
    where = torch.device(chosen)
    with progress_bar("linear") as progress:
        probed = train_classifiers(known, asked, classes, settings, where, progress)
    with progress_bar("neighbours") as progress:
        shares = nearest_neighbours(known, asked, classes, counts, temperature, where, progress) if counts else []
    best = max(probed, key=lambda one: one.val)
    if out is not None:
        write_classifier(out, known.about, best, names if names and len(names) == classes else None)
    record = {
        "train_images": len(known.labels),
        "val_images": len(asked.labels),
        "linear": [{"rate": one.rate, "train_top1": one.train, "top1": one.val} for one in probed],
        "best_rate": best.rate,
        "neighbours": [{"neighbours": k, "top1": share} for k, share in zip(counts, shares, strict=True)],
        "weights": None if out is None else str(out),
    }
    print_json(record) if as_json else _show(record)


def _show(record: dict[str, Any]) -> None:
    """Print the accuracies. record: as --json prints it."""
    console = Console(highlight=False)
    table = data_table("classifier", "train", "val")
    best, rates = record["best_rate"], [one["rate"] for one in record["linear"]]
    for one in record["linear"]:
        mark = "  best" if one["rate"] == best else ""
        table.add_row(f"linear, rate {one['rate']:g}", f"{one['train_top1']:.2%}", f"{one['top1']:.2%}{mark}")
    for one in record["neighbours"]:
        table.add_row(count(one["neighbours"], "neighbour"), "", f"{one['top1']:.2%}")
    console.print(table)
    images, of = (count(record[f"{split}_images"], "image") for split in ("val", "train"))
    console.print(f"top-1 of {images}, with features of {of}")
    if len(rates) > 1 and best in (min(rates), max(rates)):
        end = "smallest" if best == min(rates) else "largest"
        warn(f"the best rate {best:g} is the {end} one: others may be better, give them with --rates")
    if record["weights"] is not None:
        console.print(
            f"{record['weights']}: the weights with the classifier of rate {best:g}; `vitpar eval` reads them"
        )
