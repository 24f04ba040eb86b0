"""Ranks keep freed memory instead of returning it to the kernel, which avoids page faults in every step."""

import os
import subprocess
import sys

import pytest

from helpers.paths import ROOT

PROGRAM = """
import sys, torch
from vitpar.launch import ALONE, join, leave
from vitpar.launch.resources import freed_memory_given_back
from vitpar.planner.measure.device import _resident

def kept():
    before = _resident("VmRSS")
    for _ in range(2):
        x = torch.ones(2**26)
        del x
    return (_resident("VmRSS") - before) / 2**28

join(ALONE, "cpu")
what = sys.argv[1]
if what == "given back":
    with freed_memory_given_back():
        print(kept())
    print(kept())
else:
    print(kept())
leave()
"""


def share_kept(what: str, **environment: str) -> list[float]:
    """Return the shares of 256 MiB that stay resident after they were freed."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    command = [sys.executable, "-c", PROGRAM, what]
    done = subprocess.run(
        command, env={**clean, "PYTHONPATH": str(ROOT / "src"), **environment}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return [float(line) for line in done.stdout.split()]


pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux") or os.confstr("CS_GNU_LIBC_VERSION") is None, reason="needs glibc"
)


def test_ranks_keep_freed_memory() -> None:
    (kept,) = share_kept("kept")
    assert kept > 0.9


def test_keeping_freed_memory_can_be_turned_off() -> None:
    (kept,) = share_kept("kept", VITPAR_KEEP_FREED_MEMORY="0")
    assert kept < 0.1
    (kept,) = share_kept("kept", MALLOC_ARENA_MAX="2")
    assert kept > 0.9, "which says nothing about freed memory"


def test_malloc_settings_of_the_user_are_kept() -> None:
    (kept,) = share_kept("kept", MALLOC_MMAP_THRESHOLD_="65536")
    assert kept < 0.1


def test_freed_memory_is_returned_only_inside_the_context() -> None:
    meanwhile, after = share_kept("given back", MALLOC_MMAP_THRESHOLD_="134217728")
    assert meanwhile < 0.1
    meanwhile, after = share_kept("given back")
    assert meanwhile < 0.1 and after > 0.9
