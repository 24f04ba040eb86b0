"""Cases of Triton kernels, run by Triton's interpreter on the CPU in a separate process.

A module with a function `cases` runs as ``python -m helpers.NAME`` with TRITON_INTERPRET=1, which must be set before
Triton is imported, and prints a JSON object that maps each case's name to its traceback, or to null if it passed.
"""

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import pytest

from helpers.paths import ROOT


def errors_of(module: str) -> dict[str, str | None]:
    """Return the error of each case of a module by name, None if it passed. Skips the test without Triton."""
    if find_spec("triton") is None:
        pytest.skip("needs Triton: pip install --no-deps triton")
    triton, numpy = ([*map(int, version(name).split(".")[:2])] for name in ("triton", "numpy"))
    if triton < [3, 7] and numpy >= [2, 4]:
        pytest.skip("the interpreter of Triton before 3.7 needs numpy before 2.4")
    paths = os.pathsep.join([str(ROOT / "tests"), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    ours = {"PYTHONPATH": paths, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", f"helpers.{module}"]
    done = subprocess.run(command, env={**os.environ, **ours}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, str | None] = json.loads(done.stdout.splitlines()[-1])
    return found


def run(cases: Iterator[tuple[str, Callable[[], None]]]) -> None:
    """Run cases by name in this process and print what they raised."""
    compute_in_bfloat16()
    found: dict[str, str | None] = {}
    for name, case in cases:
        try:
            case()
            found[name] = None
        except Exception:
            found[name] = traceback.format_exc()
    print(json.dumps(found))


def compute_in_bfloat16() -> None:
    """Let Triton's interpreter round to the nearest bfloat16 and multiply in it, as GPUs do.

    upstream: it truncates, and multiplies the bits as integers.
    """
    import torch
    import triton.language as tl
    from triton.runtime import interpreter

    convert, dot = interpreter._convert_float, interpreter.InterpreterBuilder.create_dot

    def rounded(values: Any, source: Any, target: Any, mode: Any) -> Any:
        if (source, target) != (tl.float32, tl.bfloat16):
            return convert(values, source, target, mode)
        return torch.from_numpy(values.copy()).bfloat16().view(torch.int16).numpy().view("uint16")

    def multiplied(builder: Any, a: Any, b: Any, *rest: Any) -> Any:
        return dot(builder, *(_widened(x) if x.dtype == tl.bfloat16 else x for x in (a, b)), *rest)

    def _widened(x: Any) -> Any:
        wide = torch.from_numpy(x.data.view("int16").copy()).view(torch.bfloat16).float().numpy()
        return interpreter.TensorHandle(wide, tl.float32)

    interpreter._convert_float = rounded
    interpreter.InterpreterBuilder.create_dot = multiplied
