"""Folder that travels to the machine with the GPU: wheels that it lacks, and CIFAR-10 where a call reads it."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from bench import work_tree
from bench.programme.programmes import CALL_S, ROOT, Call
from vitpar.data.images import image_type
from vitpar.data.sources import open_source

FOLDER = ROOT / "gpu-bundle"
WHEELS, CIFAR = FOLDER / "wheels", FOLDER / "cifar10"
DECODER = FOLDER / "decoder"
"""Folder of the wheel that decodes JPEGs on the GPU: too large to travel with CIFAR-10, which no call reads with it."""
MIB = 2**20
TREE_MIB = 64
"""Largest working tree with what is carried, in MiB."""
COMMAND_LETTERS = 2000
"""Longest command of a call."""
PACKAGES = (
    *("pydantic", "pydantic_core", "annotated_types", "typing_inspection", "typing_extensions"),
    *("webdataset", "braceexpand", "simplejpeg", "tomli_w", "torchcodec"),
)
"""Packages that vitpar needs and the machine lacks."""
PRESENT = (
    *("torch==2.11.0", "torchvision==0.26.0", "numpy", "einops", "rich", "typer", "safetensors", "pillow", "timm"),
    *("pytest", "pytest-xdist", "pytest-timeout", "hypothesis"),
)
"""Packages that the machine must have, as pip names them; torch brings Triton."""
PIP = ("-m", "pip", "--quiet", "--disable-pip-version-check")
PLATFORMS = (
    "manylinux_2_28_x86_64",
    "manylinux_2_27_x86_64",
    "manylinux_2_17_x86_64",
    "manylinux2014_x86_64",
    "manylinux1_x86_64",
)
PYTHON = "3.12"
"""Python of the machine."""
REHEARSAL = ROOT / ".venv-gpu"
"""Environment of rehearsals: Python and packages of the machine."""


def download_wheels(constraints: Path) -> None:
    """Download the wheels for the machine's Python, at the tested versions. Raises ValueError with pip's message."""
    for folder in (WHEELS, DECODER):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    command = [
        sys.executable,
        *PIP,
        "download",
        "--no-deps",
        "--only-binary=:all:",
        "--python-version",
        PYTHON,
        "--implementation",
        "cp",
    ]
    command += ["--dest", str(WHEELS), *(f"--platform={platform}" for platform in PLATFORMS)]
    done = subprocess.run([*command, "-c", str(constraints), *PACKAGES], capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"the wheels cannot be downloaded: {done.stderr.strip()[-500:]}")
    for wheel in WHEELS.glob("torchcodec-*.whl"):
        wheel.rename(DECODER / wheel.name)


def rehearsal_python(base: str) -> Path:
    """Return the Python of the rehearsal's environment, which is made if it is missing (about 7 GB).

    base: a Python of the machine's version. Raises ValueError if it has another one, or with pip's message.
    """
    python, ready = REHEARSAL / "bin" / "python3", REHEARSAL / ".ready"
    if ready.exists() and ready.read_text() == " ".join(PRESENT):
        return python
    version = "import sys; print('%d.%d' % sys.version_info[:2])"
    try:
        found = subprocess.check_output([base, "-c", version], text=True).strip()
    except OSError as error:
        raise ValueError(f"{base} cannot be run ({error.strerror}): name a Python {PYTHON} with GPU_PYTHON") from None
    if found != PYTHON:
        raise ValueError(f"{base} is Python {found}: name a Python {PYTHON} with GPU_PYTHON")
    print(f"making {REHEARSAL.name} with {', '.join(PRESENT)}", flush=True)
    absent = [name for name in PACKAGES if name != "typing_extensions"]  # which torch brings, at another version
    for command in (
        [base, "-m", "venv", "--clear", str(REHEARSAL)],
        [str(python), *PIP, "install", *PRESENT],
        # Newer versions of the packages may bring what the machine's do not.
        [str(python), *PIP, "uninstall", "--yes", *absent],
    ):
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise ValueError(f"{REHEARSAL.name} cannot be made: {done.stderr.strip()[-500:]}")
    ready.write_text(" ".join(PRESENT))
    return python


def pack_cifar(source: Path) -> None:
    """Write CIFAR-10 as zips of JPEG files with maps: 50 MiB, where 60,000 members of tar shards have 130.

    source: anything that ``vitpar data pack`` reads. Images that are no JPEG are compressed at quality 95. Raises
    DataError for another one.
    """
    found = open_source(source)
    half = CIFAR.with_name(f"{CIFAR.name}.partial")
    for folder in (half, CIFAR):
        shutil.rmtree(folder, ignore_errors=True)
    half.mkdir(parents=True)
    (half / "classes.txt").write_text("".join(f"{name}\n" for name in found.classes))
    for name, split in found.splits.items():
        lines = []
        with zipfile.ZipFile(half / f"{name}.zip", "w") as archive:
            for number, label in enumerate(split.labels):
                member = f"{label}/{number:05d}.jpg"
                archive.writestr(member, _jpeg(split.read(number)))
                lines.append(f"{member}\t{label}\n")
        (half / f"{name}_map.txt").write_text("".join(lines))
    half.rename(CIFAR)


def _jpeg(data: bytes) -> bytes:
    if image_type(data) == "jpg":
        return data
    import simplejpeg

    from vitpar.data.images import decode

    return simplejpeg.encode_jpeg(decode(data), quality=95, colorspace="RGB")


def carried(call: Call) -> list[Path]:
    """Return what a call needs beside the working tree."""
    return [WHEELS, CIFAR if call.takes_data else DECODER]


def tree_bytes(call: Call) -> int:
    """Return the bytes of the working tree (tracked, and neither tracked nor ignored) with what a call carries."""
    paths = [ROOT / name for name in work_tree.names(ROOT)]
    paths += [path for folder in carried(call) for path in folder.rglob("*")]
    return sum(path.lstat().st_size for path in paths if path.is_file())


def command(programme: str, number: int, commit: str) -> str:
    """Return the command of a call, counted from 1. It writes to the folder $OUT."""
    return f'VITPAR_COMMIT={commit} python3 experiments/gpu_programme.py run {programme} --call {number} --out "$OUT"'


def faults(programme: str, number: int, call: Call, commit: str) -> list[str]:
    """Return why a call does not fit."""
    found = []
    if (size := tree_bytes(call)) > TREE_MIB * MIB:
        found.append(f"the working tree has {size / MIB:.1f} MiB of at most {TREE_MIB}: remove what is not needed")
    if len(command(programme, number, commit)) > COMMAND_LETTERS:
        found.append(f"its command is longer than {COMMAND_LETTERS} letters")
    if call.limit > CALL_S:
        found.append(f"its limits add up to {call.limit:.0f} s of at most {CALL_S}")
    if call.takes_data and not CIFAR.is_dir():
        found.append("it needs CIFAR-10: name its folder with --cifar PATH")
    return found
