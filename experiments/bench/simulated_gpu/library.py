"""Build the C++ part of a simulated GPU once per torch version, and load it. Does not import torch."""

import ctypes
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

SOURCE = Path(__file__).with_name("guard.cpp")
FLAGS = ("-std=c++20", "-O0", "-w", "-shared", "-fPIC")


def compiler() -> str | None:
    """Return the path of a C++ compiler, or None if there is none."""
    return next(filter(None, map(shutil.which, (os.environ.get("CXX") or "c++", "g++", "clang++"))), None)


def build(folder: Path) -> Path:
    """Return the library in `folder`, building it if it is missing. Several processes may call this at once."""
    found = compiler()
    assert found is not None, "there is no C++ compiler"
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.origin is not None
    torch = Path(spec.origin).parent
    flags = (*FLAGS, f"-I{torch / 'include'}", f"-L{torch / 'lib'}", f"-Wl,-rpath,{torch / 'lib'}")
    digest = hashlib.sha256(repr((found, flags)).encode() + SOURCE.read_bytes()).hexdigest()
    library = folder / f"torch-{version('torch')}-{digest[:16]}.so"
    if not library.exists():
        partial = library.with_suffix(f".{os.getpid()}")
        command = [found, *flags, str(SOURCE), "-o", str(partial), "-lc10", "-ltorch_cpu"]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, f"{SOURCE.name} cannot be compiled: {done.stderr}"
        partial.replace(library)
    return library


def load(library: Path | str) -> ctypes.CDLL:
    """Load the library, then torch, which takes its CUDA device guard from it. Call it in a separate process."""
    assert "torch" not in sys.modules, "torch asks for its CUDA part when it is imported: load the library before"
    loaded = ctypes.CDLL(str(library))
    import torch  # noqa: F401

    loaded.use_fake_guard()
    return loaded
