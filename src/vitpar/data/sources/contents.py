"""Description of an opened source, before it is packed."""

from vitpar.data.sources.source import Source
from vitpar.text import count, shown

CLASSES_SHOWN = 5
"""Most classes that are named."""


def describe(location: str, source: Source) -> list[str]:
    """Return lines on what was found at `location`: splits and their origin, classes, and what is left out."""
    names = [shown(name) for name in source.class_names or source.classes]
    listed = ", ".join(names[:CLASSES_SHOWN]) + ", …" * (len(names) > CLASSES_SHOWN)
    lines = [f"{shown(location)}: {count(len(names), 'class')}: {listed}"]
    for name, split in source.splits.items():
        origin = f" from {shown(split.origin)}" * bool(split.origin)
        lines.append(f"  {name}: {len(split.labels):,} images{origin}")
    if "val" not in source.splits:
        lines.append("  no val split: runs do not evaluate")
    return lines + [f"  left out: {sentence}" for sentence in source.left_out]
