"""Which split a file is of, by the words in its name."""

import re

SPLITS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("val", "valid", "validation"), "val"),
    "test": "test",
}


def split_of(name: str) -> str | None:
    """`train`, `val` or `test`, as in ``imagenet-validation-00012-of-00128.tar``; None for none of them."""
    words = re.split(r"[^a-z]+", name.lower())
    return next((SPLITS[word] for word in words if word in SPLITS), None)
