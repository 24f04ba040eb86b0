"""Read the GPU's state from nvidia-smi: driver, clocks, other processes. Does not import torch."""

from __future__ import annotations

import subprocess
from typing import Any

FACTS = ("name", "driver_version", "memory.total", "memory.used", "compute_mode", "temperature.gpu", "power.limit")
SAMPLE = ("clocks.sm", "clocks.max.sm", "power.draw", "temperature.gpu", "memory.used")
REASONS = ("clocks_event_reasons.active", "clocks_throttle_reasons.active")
"""Query for the clock limits: its name in newer drivers, then in older ones."""
SLOW = {
    0x04: "software power cap",
    0x08: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
}
"""Bits of the reasons for a reduced clock. Not listed: an idle GPU, and clocks set by the user."""
USED_MIB = 1024
"""MiB in use before this program starts that indicate another process."""


def gpu_facts() -> dict[str, str]:
    """Return facts about the GPU for the header; only the key `nvidia-smi` if that cannot be run."""
    found = _query("gpu", FACTS)
    if found is None:
        return {"nvidia-smi": "cannot be run: driver, clocks and other processes are not known"}
    return dict(zip(FACTS, found, strict=True))


def complaints() -> list[str]:
    """Return reasons why the GPU may not be idle; an empty list if nvidia-smi cannot be run."""
    found, now = [], sample() or {"memory.used": 0.0, "slow": []}
    others = _query("compute-apps", ("pid", "process_name", "used_memory"))
    if others and others[0]:
        found.append(f"another process uses the GPU ({', '.join(others)}): end it, or read the times with care")
    elif now["memory.used"] > USED_MIB:
        used = f"{now['memory.used']:.0f} MiB of the GPU are in use before anything is started"
        found.append(f"{used}: another process may use it")
    if now["slow"]:
        found.append(f"the GPU's clock is held back ({', '.join(now['slow'])}): read the times with care")
    return found


def sample() -> dict[str, Any] | None:
    """Return clock (MHz), power (W), temperature (°C), memory (MiB) and reasons for a reduced clock (`slow`).

    Return None if nvidia-smi cannot be run.
    """
    for reasons in REASONS:
        if found := _query("gpu", (*SAMPLE, reasons)):
            bits = int(found[-1], 16) if found[-1].startswith("0x") else 0
            slow = [words for bit, words in SLOW.items() if bits & bit]
            return {**dict(zip(SAMPLE, map(_number, found), strict=False)), "slow": slow}
    return None


def _query(kind: str, fields: tuple[str, ...]) -> list[str] | None:
    """Return the first row of nvidia-smi's answer, None without one; `[""]` if no process uses the GPU."""
    command = ["nvidia-smi", f"--query-{kind}={','.join(fields)}", "--format=csv,noheader,nounits"]
    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    rows = [[cell.strip() for cell in line.split(",")] for line in output.splitlines() if line.strip()]
    if not rows:
        return [""] if kind == "compute-apps" else None
    return rows[0] if len(rows[0]) == len(fields) else None


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0
