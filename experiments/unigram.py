"""Print the loss of a model that predicts every token by its frequency, for comparison with a trained one.

    python experiments/unigram.py --recipe experiments/bert_mini.toml --data data_shards/text
    vitpar eval --checkpoint runs/bert --data data_shards/text

Counts the tokens to predict of the training set, adds one to each count, and prints the mean loss in nats of the tokens
to predict of the validation set: those that `vitpar eval` masks.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bench.harness import parser
from vitpar.data.text.loader import TextEvalLoader
from vitpar.data.text.text_set import TextSet
from vitpar.models import IGNORED
from vitpar.tasks import task_of
from vitpar.tasks.text import TextTask
from vitpar.training.recipe import read_recipe


def targets(task: TextTask, text: TextSet) -> Iterator[NDArray[np.int64]]:
    """Yield the tokens to predict of each batch."""
    for batch in TextEvalLoader(text, batch_size=256, workers=0):
        found = task.prepare(batch.ids.numpy(), batch.lengths.numpy(), batch.keys.numpy()).targets
        yield found[found != IGNORED]


def main() -> None:
    """Read the options and print the loss."""
    made = parser(__doc__)
    made.add_argument("--recipe", type=Path, required=True)
    made.add_argument("--data", type=Path, required=True)
    options = made.parse_args()
    train, val = (TextSet.open(options.data, split) for split in ("train", "val"))
    task = task_of(read_recipe(options.recipe, {"data.path": str(options.data)}), train)
    assert isinstance(task, TextTask), "the recipe has a task of text"
    counts = np.ones(train.vocab_size)
    for tokens in targets(task, train):
        counts += np.bincount(tokens, minlength=len(counts))
    losses = np.concatenate([-np.log(counts / counts.sum())[tokens] for tokens in targets(task, val)])
    print(f"loss {losses.mean():.4f} nats of {len(losses):,} tokens of {options.data}, val")


if __name__ == "__main__":
    main()
