"""Report on a machine (`collect`), which only observes, and problems in it (`problems`), also of another machine."""

import os
import platform
import re
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from vitpar.errors import LaunchError
from vitpar.launch import find_world, spawn
from vitpar.launch.resources import ENOUGH, cpu_cores
from vitpar.text import shown

Severity = Literal["error", "warning"]
Problem = tuple[Severity, str]

MINIMUM = {
    **{"python": "3.11", "torch": "2.11", "einops": "0.8", "numpy": "1.26", "webdataset": "1.0", "pydantic": "2.9"},
    **{"safetensors": "0.5", "rich": "13.7", "typer": "0.15", "pillow": "10.3", "simplejpeg": "1.8", "tomli-w": "1.1"},
}
"""Oldest supported version of Python and of each package, as in the project's dependencies."""
GB = 10**9
ENOUGH_SHARED_MEMORY = GB
"""Bytes of /dev/shm, through which NCCL moves data between ranks. Containers often get 64 MB."""
ENOUGH_PROCESSES = 1024
"""Processes of the user."""
ENOUGH_MEMORY = 2 * GB
"""Bytes of free host memory for two ranks, before any model."""


def collect() -> dict[str, object]:
    """Return the report that `problems` judges, as values that JSON can express.

    Takes seconds: it starts two ranks to verify that they can communicate.

    versions: name -> version, or None if not installed.
    system: OS, cores, memory in bytes.
    torch: why torch cannot be imported; None if it can.
    cpu_capability, devices, distributed: vector instructions, GPUs and backends of torch; empty without torch.
    gpu_driver: whether an NVIDIA driver is loaded.
    world: the world that a launcher describes, or its error; None without a launcher.
    limits: of open files, processes and shared memory; None for unlimited or unknown.
    local_world: ok, seconds, error.
    compiler: path of the C++ compiler that torch.compile needs on a CPU, or None.
    timm: why timm is installed but cannot be imported; None if it can, or is not installed.
    """
    compilers = [os.environ.get("CXX"), "g++", "clang++", "c++"]
    return {
        "versions": {
            "vitpar": _version("vitpar"),
            "python": platform.python_version(),
            **{name: _version(name) for name in MINIMUM if name != "python"},
        },
        "system": _system(),
        **_torch(),
        "gpu_driver": Path("/proc/driver/nvidia/version").exists(),
        "world": _world(),
        "limits": _limits(),
        "local_world": _local_world(),
        "compiler": next((path for name in compilers if name and (path := shutil.which(name))), None),
        "timm": _timm(),
    }


def problems(report: Mapping[str, Any]) -> list[Problem]:
    """Return the problems in a report of `collect`, each as a sentence with its fix; errors before warnings."""
    messages = [
        *_wrong_versions(report["versions"]),
        *_wrong_world(report),
        *_wrong_devices(report),
        *_tight_limits(report),
    ]
    if report["compiler"] is None:
        messages.append(
            ("warning", "no C++ compiler was found, so torch.compile fails on the CPU: install g++ or set CXX")
        )
    if report["timm"] is not None:
        words = f"timm is installed but cannot be imported ({report['timm']}), which only its own programs need"
        messages.append(("warning", f"{words}: install torch and torchvision from one index"))
    return sorted(messages, key=lambda problem: problem[0])


# Collecting


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _system() -> dict[str, Any]:
    meminfo = Path("/proc/meminfo")
    memory = dict(re.findall(r"(\w+): +(\d+) kB", meminfo.read_text())) if meminfo.exists() else {}
    return {
        "os": platform.platform(),
        "machine": platform.machine(),
        "cores": cpu_cores(),
        "memory_bytes": int(memory["MemTotal"]) * 1024 if memory else None,
        "memory_available_bytes": int(memory["MemAvailable"]) * 1024 if memory else None,
    }


def _torch() -> dict[str, Any]:
    try:
        import torch
        import torch.distributed as dist
    except (ImportError, OSError) as error:  # OSError: a shared library that does not load
        nothing = {"gloo": False, "nccl": False, "cuda": None}
        return {"torch": str(error), "cpu_capability": None, "devices": [], "distributed": nothing}
    gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    available = dist.is_available()
    return {
        "torch": None,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "devices": [
            {"name": gpu.name, "memory_bytes": gpu.total_memory, "compute_capability": [gpu.major, gpu.minor]}
            for gpu in gpus
        ],
        "distributed": {
            "gloo": available and dist.is_gloo_available(),
            "nccl": available and dist.is_nccl_available(),
            "cuda": torch.version.cuda,
        },
    }


def _world() -> dict[str, Any] | None:
    try:
        world = find_world()
    except LaunchError as error:
        return {"error": str(error)}
    return asdict(world) if world else None


def _limits() -> dict[str, int | None]:
    def soft(limit: int) -> int | None:
        value = resource.getrlimit(limit)[0]
        return None if value == resource.RLIM_INFINITY else value

    shared = Path("/dev/shm")
    return {
        "open_files": soft(resource.RLIMIT_NOFILE),
        "user_processes": soft(resource.RLIMIT_NPROC),
        "shared_memory_bytes": shutil.disk_usage(shared).total if shared.exists() else None,
    }


def _local_world() -> dict[str, Any]:
    start = time.monotonic()
    try:
        probe, messages = "from vitpar.launch.process_group import probe; probe()", list[str]()
        code = spawn(2, ["-c", probe], tell=messages.append)
        error = "".join(messages) or (f"the ranks ended with exit code {code}" if code else None)
    except (ImportError, OSError) as failure:  # no torch, no loopback, no processes left
        error = str(failure)
    return {"ok": error is None, "seconds": round(time.monotonic() - start, 2), "error": error}


def _timm() -> str | None:
    if find_spec("timm") is None:
        return None
    # In a process of its own, since a failed import may leave half of torchvision behind.
    done = subprocess.run([sys.executable, "-P", "-c", "import timm"], capture_output=True, text=True, check=False)
    return shown((done.stderr.strip().splitlines() or ["?"])[-1]) if done.returncode else None


# Judging


def _wrong_versions(versions: Mapping[str, str | None]) -> Iterator[Problem]:
    for name, minimum in MINIMUM.items():
        have = versions[name]
        fix = f"use Python {minimum} or newer" if name == "python" else f"pip install '{name}>={minimum}'"
        if have is not None and _release(have) < _release(minimum):
            yield "error", f"{name} is {have} but vitpar needs {minimum} or newer: {fix}"
        elif have is None and name == "simplejpeg" and versions["pillow"]:
            yield "warning", f"simplejpeg is missing, so the slower Pillow reads JPEGs: {fix}"
        elif have is None:
            yield "error", f"{name} is missing: {fix}"


def _release(text: str) -> list[int]:
    """Return the numbers of a version: `2.13.0+cpu` -> [2, 13, 0]."""
    return [int(part) for part in re.findall(r"\d+", text.split("+")[0])]


def _wrong_world(report: Mapping[str, Any]) -> Iterator[Problem]:
    local, world = report["local_world"], report["world"]
    if report["torch"] is not None:
        if report["versions"]["torch"]:  # otherwise `_wrong_versions` reports it as missing
            yield "error", f"torch is installed but cannot be imported ({report['torch']}): install it again"
    elif not report["distributed"]["gloo"]:
        yield "error", "this torch has no gloo backend, which ranks need: install torch from https://pytorch.org"
    elif not local["ok"]:
        yield "error", f"an all-reduce of two local ranks failed: {local['error']}"
    if world and "error" in world:
        yield "error", world["error"]


def _wrong_devices(report: Mapping[str, Any]) -> Iterator[Problem]:
    devices, distributed = report["devices"], report["distributed"]
    if devices and not distributed["nccl"]:
        yield "error", f"{len(devices)} GPUs but a torch without NCCL: install torch from https://pytorch.org"
    if report["gpu_driver"] and not devices:
        cuda = distributed["cuda"]
        why = f"the driver may be too old for its CUDA {cuda}" if cuda else "it is built for CPUs only"
        fix = "install a matching torch from https://pytorch.org, or fix CUDA_VISIBLE_DEVICES"
        yield "warning", f"an NVIDIA driver is loaded but torch sees no GPU ({why}): {fix}"
    for index, device in enumerate(devices):
        major, minor = device["compute_capability"]
        if major < 8:
            fix = "train in float32"
            yield "warning", f"GPU {index} ({device['name']}, {major}.{minor}) is too old for fast bfloat16: {fix}"


def _tight_limits(report: Mapping[str, Any]) -> Iterator[Problem]:
    limits, available = report["limits"], report["system"]["memory_available_bytes"]
    files, processes, shared = (limits[key] for key in ("open_files", "user_processes", "shared_memory_bytes"))
    if files is not None and files < ENOUGH:
        yield "warning", f"the limit of open files is {files}: raise it with `ulimit -n {ENOUGH}`"
    if processes is not None and processes < ENOUGH_PROCESSES:
        yield "warning", f"the limit of processes is {processes}: raise it with `ulimit -u {ENOUGH_PROCESSES}`"
    if shared is not None and shared < ENOUGH_SHARED_MEMORY:
        fix = "remount it larger (`docker run --shm-size=8g`)"
        yield "warning", f"/dev/shm, which NCCL uses between ranks, has {shared / GB:.2g} GB: {fix}"
    if available is not None and available < ENOUGH_MEMORY:
        yield "warning", f"only {available / GB:.2g} GB of memory is free: stop other programs or start fewer ranks"
