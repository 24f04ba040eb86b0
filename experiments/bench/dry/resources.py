"""Compile Triton kernels to machine code, without a GPU, and read the registers and memory that they take."""

from __future__ import annotations

import io
import re
from contextlib import redirect_stdout
from typing import Any

from bench.dry.work import Resources

SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
REGISTERS = re.compile(r"Used (\d+) registers")


def resources(autotuner: Any) -> tuple[Resources, ...]:
    """Return the resources of each configuration of a kernel. A GPU would time them and keep the fastest.

    autotuner: the compiler's object with the kernel's configurations
    """
    from triton import knobs

    knobs.nvidia.dump_ptxas_log = True  # Triton prints the log, but not of a kernel that is in its cache
    knobs.compilation.always_compile = True
    found = []
    for configuration in autotuner.configs:
        log = io.StringIO()
        with redirect_stdout(log):
            compiled = autotuner._precompile_config(configuration).kernel
        found.append(read(log.getvalue(), compiled.metadata.shared, compiled.metadata.num_warps))
    return tuple(found)


def read(log: str, shared: int, warps: int) -> Resources:
    """Return the resources that ptxas reports in `log`."""
    spills, registers = SPILLS.search(log), REGISTERS.search(log)
    assert spills and registers, f"ptxas reports neither registers nor spills: {log!r}"
    return Resources(int(registers[1]), sum(map(int, spills.groups())), shared, warps)
