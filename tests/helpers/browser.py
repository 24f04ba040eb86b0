"""Pages in headless Chromium, where it is installed."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
OPTIONS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--enable-logging=stderr"),
)


def chromium() -> str:
    """Return the path of Chromium; skip the test if there is none."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip("Chromium is not installed: `apt-get install chromium` on Debian runs the tests of pages in it")
    return found


def opened(url: str, profile: Path, *, milliseconds: int = 2000) -> tuple[str, list[str]]:
    """Return the document of `url` after its scripts have run, and the messages on the browser's console.

    profile: folder for the browser's own files.
    milliseconds: virtual time that the page gets.
    """
    sizes = ("--window-size=1280,1000", f"--virtual-time-budget={milliseconds}", f"--user-data-dir={profile}")
    done = subprocess.run(
        [chromium(), *OPTIONS, *sizes, "--dump-dom", url], capture_output=True, text=True, timeout=120
    )
    return done.stdout, re.findall(r"CONSOLE.*", done.stderr)
