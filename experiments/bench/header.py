"""Header of a table of measurements: date, commit, command, hardware, versions."""

import os
import platform
import shlex
import subprocess
import sys
import sysconfig
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
"""The checkout."""


def header() -> dict[str, str]:
    """Return date, commit, command, hardware and versions as text."""
    import torch

    if torch.cuda.is_available():
        hardware = torch.cuda.get_device_name()
    else:
        hardware = (
            f"{os.cpu_count()}-core {platform.machine()} ({_cpu_name()}), load {os.getloadavg()[0]:.1f} at the start"
        )
    return {
        "date": date.today().isoformat(),
        "commit": _commit(),
        "command": without_folders(shlex.join(["python", *sys.argv])),
        "hardware": hardware,
        "versions": f"torch {torch.__version__}, Python {platform.python_version()}",
    }


def without_folders(text: str) -> str:
    """Return text without the places of this checkout, of the interpreter's packages and of the home folder."""
    for folder in (str(ROOT), sysconfig.get_paths()["purelib"], str(Path.home())):
        text = text.replace(f"{folder}/", "")
    return text


def _commit() -> str:
    """Return the commit of this checkout, marked if tracked files differ from it.

    The environment variable VITPAR_COMMIT says it for a copy, which may have an older history or none.
    """
    if "VITPAR_COMMIT" in os.environ:
        return os.environ["VITPAR_COMMIT"]
    try:
        commit = _git("rev-parse", "--short=12", "HEAD")
        changed = _git("status", "--porcelain", "-uno")
    except (OSError, subprocess.CalledProcessError):
        return "unknown (no git checkout: set VITPAR_COMMIT)"
    return commit + (" with local changes" if changed else "")


def _git(*arguments: str) -> str:
    command = ["git", *arguments]
    return subprocess.check_output(command, cwd=Path(__file__).parent, stderr=subprocess.DEVNULL, text=True).strip()


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown CPU")
