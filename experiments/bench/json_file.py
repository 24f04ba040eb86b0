"""JSON files that are always complete: they are written under another name, then renamed."""

import json
import os
from pathlib import Path
from typing import Any


def write_json(path: Path, value: Any) -> None:
    """Replace the content of `path` by `value` as JSON, atomically."""
    half = path.with_name(f"{path.name}.partial")
    half.write_text(json.dumps(value, indent=1))
    os.replace(half, path)


def read_json(path: Path) -> Any:
    """Return the JSON value in `path`, or None if the file is missing or not valid JSON."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None
