"""JSON files that are complete at every moment: written under another name, then renamed."""

import json
import os
from pathlib import Path
from typing import Any


def write_json(path: Path, value: Any) -> None:
    """Replace `path` by `value` as JSON, at once or not at all."""
    half = path.with_name(f"{path.name}.partial")
    half.write_text(json.dumps(value, indent=1))
    os.replace(half, path)


def read_json(path: Path) -> Any:
    """Return what `path` holds; None where it is missing or no JSON."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None
