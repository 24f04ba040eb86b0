"""The default settings by the number of training images, with their sources."""

from __future__ import annotations

import textwrap
from typing import Any

from vitpar.recipe.defaults import (
    FINE_TUNING,
    LAMB_BATCH,
    LAMB_LR,
    MAX_LR,
    MAX_WARMUP,
    PATCHES,
    ROWS,
    SMALL_IMAGE,
    TASKS,
    TINY_IMAGES,
    DefaultsRow,
)

NOTES = (
    f"**Model.** Without `--model`, ViT-Ti for up to {TINY_IMAGES:,} images and ViT-S for more. Images whose shorter "
    f"side has at most {PATCHES[-1][0]} pixels keep their size, with patches of 2 (up to {PATCHES[0][0]} pixels), 4 "
    f"(up to {PATCHES[1][0]}) or 8 pixels: 2112.13492 has 4 for CIFAR and 8 for Tiny-ImageNet. Larger ones, and those "
    "of streams, have 224 pixels and patches of 16. Where `--mesh` splits layers in ways that the heads of this model "
    "do not allow (ViT-Ti has 3), the next size of ViT that it can split is taken, and the run says so.",
    f"**Learning rate.** The row's rate times the square root of `train.batch_size` over the row's batch (2205.10287 "
    f"for Adam), at most {MAX_LR:g}. DeiT's own rule is linear; both agree at the row's batch.",
    f"**Other optimizers.** LAMB has {LAMB_LR:g} at {LAMB_BATCH:,} images (2204.07118) and the same rule (1904.00962), "
    f"at most {2 * LAMB_LR:g}. Muon has AdamW's rate if it is scaled to match AdamW's updates (2502.16982). Adam has "
    "AdamW's rate and no weight decay. SGD, Lion, LARS and Adafactor keep the fixed defaults: set their rate.",
    f"**Warm-up.** At most {MAX_WARMUP:.0%} of the run, which shortens it in short runs.",
    "**Clipping.** Gradients are clipped at norm 1, the fixed default, as in 2106.10270, 2204.07118 and 2205.01580.",
    "**Averaging.** Weights are not averaged. In DeiT that adds 0.1 points, which are gone after fine-tuning, and it "
    "needs a copy of all parameters.",
    f"**Small images.** Models for images of up to {SMALL_IMAGE} pixels crop 0.8 to 1 of an image's area in training, "
    "and nothing in evaluation (2104.05704).",
    "**Other tasks** than classification have no mixup, CutMix and label smoothing.",
    *(
        f"**`--task {name}`** has nothing of the table: {row.model.replace('_{}', '')}, {row.epochs} epochs with "
        f"{row.warmup_epochs:g} of warm-up, {row.sources}."
        + (f" Above {row.most:,} samples, epochs and warm-up are those of the table." if row.most else "")
        for name, row in TASKS.items()
    ),
    f"**Weights.** A run that starts from weights has the fixed defaults, {FINE_TUNING['train.epochs']} epochs and, "
    f"with AdamW or Adam, a rate of {FINE_TUNING['optimizer.lr']:g}.",
    "**Streams.** Repeats, mixup and CutMix are left out, since streams do not support them.",
    "**Larger than ViT-B** is a model with more than 12 blocks or with `embed_dim` above 768.",
)
_LINES = (
    ("epochs", "train.epochs"),
    ("warm-up, epochs", "lr_schedule.warmup"),
    ("learning rate, at batch size", "optimizer.lr"),
    ("weight decay", "optimizer.weight_decay"),
    ("drop-path", "model.drop_path"),
    ("label smoothing", "train.label_smoothing"),
    ("area of a crop", "data.crop_scale"),
    ("policy", "augment.policy"),
    ("random erasing", "augment.random_erasing"),
    ("mixup", "augment.mixup"),
    ("CutMix", "augment.cutmix"),
    ("probability of mixup or CutMix", "augment.mixup_prob"),
    ("repeated augmentation", "augment.repeats"),
)


_ABOUT = """\
`vitpar train --data DIR` without `--recipe` trains with published settings for that number of images, and chooses a
model by their number and size.

```
vitpar train --data data_shards/mine --dry-run                       # print the settings; without --dry-run, train
vitpar train --data data_shards/mine --dry-run --set augment.mixup=0 # options and --set replace single settings
vitpar train --recipe runs/mine/recipe.toml                          # repeat a run: its recipe.toml has all values
```

From Python: `vitpar.recipe.defaults.recipe_for(samples, {"data.path": …}, side=pixels)`.

| command | settings that are not given |
|---|---|
| `vitpar train --data` | those of the table below |
| `vitpar train --recipe` | fixed defaults ([settings.md](settings.md)), whatever the data |
| `vitpar train --data --weights` | fixed defaults, since the table is for training from initial values |
| `vitpar train --resume` | those of the resumed run |
| `vitpar data info --preview` | augmentation of the table below |
| other commands | fixed defaults |

Written by `make docs` from `src/vitpar/recipe/defaults.py`. Numbers in parentheses are arXiv's.

## Settings by number of training images

A value after a slash is for models larger than ViT-B. An empty cell is the fixed default.
"""


def page() -> str:
    """Return the page."""
    sizes = [f"up to {row.most:,}" if row.most else "more" for row in ROWS]
    lines = [f"| training images | {' | '.join(sizes)} |", "|---" * (len(ROWS) + 1) + "|"]
    lines.append(f"| example | {' | '.join(row.example for row in ROWS)} |")
    for words, key in _LINES:
        lines.append(f"| {words} (`{key}`) | {' | '.join(_cell(row, key) for row in ROWS)} |")
    sources = [_wrapped(f"- **{size}**: {row.sources}.") for size, row in zip(sizes, ROWS, strict=True)]
    notes = [_wrapped(f"- {note}") for note in NOTES]
    return "\n".join(
        ["# Default settings", "", _ABOUT, *lines, "", "## Rules", "", *notes, "", "## Sources", "", *sources, ""]
    )


def _wrapped(text: str) -> str:
    indent = "  " if text.startswith("- ") else ""
    return textwrap.fill(text, 140, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _cell(row: DefaultsRow, key: str) -> str:
    own = {"train.epochs": row.epochs, "lr_schedule.warmup": row.warmup_epochs, "optimizer.lr": row.lr}
    value, larger = {**row.settings, **own}.get(key), row.larger.get("lr" if key == "optimizer.lr" else key)
    words = _shown(value) if larger is None else f"{_shown(value) or 0} / {_shown(larger)}"
    return f"{words}, at {row.batch:,}" if key == "optimizer.lr" else words


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return " to ".join(f"{part:g}" for part in value)
    return "" if value is None else value if isinstance(value, str) else f"{value:g}"
