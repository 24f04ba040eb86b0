"""Ranks keep freed memory instead of returning it to the kernel, which avoids page faults in every step."""

import os
import sys

import pytest
import torch

from helpers.ranks import in_forks
from vitpar.launch import ALONE, join
from vitpar.launch.resources import freed_memory_given_back
from vitpar.planner.measure.device import _resident


def kept() -> float:
    """Return the share of 256 MiB that stays resident after it was freed."""
    before = _resident("VmRSS")
    for _ in range(2):
        x = torch.ones(2**26)
        del x
    return (_resident("VmRSS") - before) / 2**28


def shares() -> list[float]:
    """Return the shares in a world, inside `freed_memory_given_back`, and after it."""
    join(ALONE, "cpu")
    first = kept() if "LATER" not in os.environ else 0.0  # memory that was freed before the block may be reused inside
    with freed_memory_given_back():
        meanwhile = kept()
    return [first, meanwhile, kept()]


@pytest.mark.skipif(
    not sys.platform.startswith("linux") or os.confstr("CS_GNU_LIBC_VERSION") is None, reason="needs glibc"
)
def test_ranks_keep_freed_memory_unless_settings_forbid_it() -> None:
    environments = {
        "default": {},
        "given back": {"LATER": "1"},
        "off": {"VITPAR_KEEP_FREED_MEMORY": "0"},
        "other setting": {"MALLOC_ARENA_MAX": "2"},  # which says nothing about freed memory
        "user's setting": {"MALLOC_MMAP_THRESHOLD_": "65536"},
        "later, with the user's setting": {"LATER": "1", "MALLOC_MMAP_THRESHOLD_": "134217728"},
    }
    found = dict(zip(environments, in_forks(shares, environments.values()), strict=True))
    assert found["default"][0] > 0.9 and found["other setting"][0] > 0.9, found
    assert found["off"][0] < 0.1 and found["user's setting"][0] < 0.1, found
    assert found["given back"][1] < 0.1 < 0.9 < found["given back"][2], found
    assert found["later, with the user's setting"][1] < 0.1, found
