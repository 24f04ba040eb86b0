"""A package `trackio` that follows trackio's documented functions, records their calls and can misbehave."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

SOURCE = """
import json, os, time


def _record(call, **values):
    with open(os.environ["FAKE_TRACKIO_LOG"], "a") as file:
        file.write(json.dumps({"call": call, **values}) + "\\n")


def _misbehave(place):
    mode = os.environ.get("FAKE_TRACKIO", "")
    if mode == f"raise in {place}":
        raise RuntimeError("[red]no \\x1b[2J disk" + " and more" * 100)
    if mode == f"block in {place}":
        time.sleep(3600)
    if mode == f"exit in {place}":
        raise SystemExit(3)
    if mode == f"print in {place}":
        print("noise")


def init(project, name=None, group=None, space_id=None, server_url=None, dataset_id=None, bucket_id=None, config=None,
         resume="never", settings=None, private=None, embed=True, auto_log_gpu=None, gpu_log_interval=10.0,
         auto_log_cpu=None, cpu_log_interval=10.0, webhook_url=None, webhook_min_level=None):
    _misbehave("init")
    _record("init", project=project, name=name, config=config, resume=resume, embed=embed,
            automatic=[auto_log_gpu, auto_log_cpu], space=os.environ.get("TRACKIO_SPACE_ID"))


def log(metrics, step=None):
    _misbehave("log")
    _record("log", metrics=metrics, step=step)


def finish():
    _misbehave("finish")
    _record("finish")


if os.environ.get("FAKE_TRACKIO") == "raise in import":
    raise ImportError("a library is missing")
"""


class FakeTrackio:
    """Installed fake package: sets how it misbehaves and reads what it was called with."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        package = folder / "fakes" / "trackio"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text(SOURCE)
        self._log, self._patch = folder / "calls.jsonl", patch
        patch.syspath_prepend(str(package.parent))
        patch.setenv("FAKE_TRACKIO_LOG", str(self._log))
        patch.delitem(sys.modules, "trackio", raising=False)

    def misbehave(self, how: str) -> None:
        """Set the fault: `raise`, `block`, `exit` or `print`, in `import`, `init`, `log` or `finish`."""
        self._patch.setenv("FAKE_TRACKIO", how)

    def calls(self, name: str = "") -> list[dict[str, Any]]:
        """Return all calls, or those of one function, in order."""
        lines = self._log.read_text().splitlines() if self._log.exists() else []
        return [call for call in map(json.loads, lines) if name in ("", call["call"])]
