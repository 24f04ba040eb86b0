"""Compile Triton kernels to machine code, without a GPU, and read the registers and memory that they take."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import partial
from typing import Any

from bench.dry.work import Resources
from bench.simulated_gpu.gpus import Gpu

SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
REGISTERS = re.compile(r"Used (\d+) registers")


def resources(autotuner: Any) -> tuple[Resources, ...]:
    """Return the resources of each configuration of a kernel. A GPU would time them and keep the fastest.

    autotuner: the compiler's object with the kernel's configurations
    """
    return tuple(_compiled(lambda one=one: autotuner._precompile_config(one).kernel) for one in autotuner.configs)


def packed_attention(head_dim: int, gpu: Gpu) -> dict[str, tuple[Resources, ...]]:
    """Return the resources of the kernels of packed attention by the name of the operation that starts them."""
    import triton
    from triton.backends.compiler import GPUTarget

    from vitpar.kernels import attention

    constants = attention.constants(head_dim)
    options = {name: constants.pop(name) for name in ("num_warps", "num_stages")}
    types = {"logs": "*fp32", "sums": "*fp32", "scale": "fp32", "factor": "fp32", "tokens": "i32", "heads": "i32"}
    found = {}
    for name, kernel in (
        ("packed_attention", attention._forward_kernel),
        ("packed_attention_backward", attention._backward_kernel),
    ):
        names = [one.name for one in kernel.params]
        signature = {one: "constexpr" if one in constants else types.get(one, "*bf16") for one in names}
        aligned = {(n,): [["tt.divisibility", 16]] for n, one in enumerate(names) if signature[one].startswith("*")}
        source = triton.compiler.ASTSource(kernel, signature, constants, aligned)
        target = GPUTarget("cuda", 10 * gpu.major, 32)
        found[name] = (_compiled(partial(triton.compile, source, target=target, options=options)),)
    return found


def _compiled(compile_: Callable[[], Any]) -> Resources:
    """Return the resources of a kernel that `compile_` compiles and returns."""
    from triton import knobs

    knobs.nvidia.dump_ptxas_log = True  # Triton prints the log, but not of a kernel that is in its cache
    knobs.compilation.always_compile = True
    log = io.StringIO()
    with redirect_stdout(log):
        compiled = compile_()
    return read(log.getvalue(), compiled.metadata.shared, compiled.metadata.num_warps)


def read(log: str, shared: int, warps: int) -> Resources:
    """Return the resources that ptxas reports in `log`."""
    spills, registers = SPILLS.search(log), REGISTERS.search(log)
    assert spills and registers, f"ptxas reports neither registers nor spills: {log!r}"
    return Resources(int(registers[1]), sum(map(int, spills.groups())), shared, warps)
