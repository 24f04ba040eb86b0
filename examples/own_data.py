"""Pack a folder of images and train a small ViT on them.

    python examples/own_data.py PATH/TO/images

The folder holds train/CLASS/*.jpg and val/CLASS/*.jpg, or CLASS/*.jpg alone. Without an argument, the script
uses scikit-learn's digits.
"""

import sys
from pathlib import Path

import vitpar
from vitpar.data.shards.pack import pack
from vitpar.data.shards.shard_set import ShardSet


def main() -> None:
    """Pack, train for two epochs, and print the last evaluation."""
    source = sys.argv[1] if len(sys.argv) > 1 else "digits"
    shards = Path("data_shards/example")
    pack(source, shards)
    train_set = ShardSet.open(shards, "train")
    print(f"{len(train_set):,} images of {len(train_set.classes)} classes")
    summary = vitpar.train(
        "digits",
        {"data.path": str(shards), "train.epochs": 2, "train.batch_size": min(64, len(train_set))},
        run_dir="runs/example",
    )
    print(f"top-1 {summary['top1']:.1%}, weights in {summary['weights']}")


if __name__ == "__main__":
    main()
