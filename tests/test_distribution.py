"""Wheel and sdist: what is in them, and commands that run from an unpacked wheel, away from the repository."""

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the sdist."""
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-d", str(folder)], cwd=ROOT, check=True)
    return folder


@pytest.fixture(scope="module")
def unpacked(built: Path) -> Path:
    """The unpacked wheel."""
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(built / "unpacked")
    return built / "unpacked"


def test_the_wheel_holds_the_packages_with_their_data(unpacked: Path) -> None:
    sources = {path.relative_to(ROOT / "src") for path in (ROOT / "src/vitpar").rglob("*") if path.is_file()}
    sources = {path for path in sources if "__pycache__" not in path.parts}
    wheel = {path.relative_to(unpacked) for path in (unpacked / "vitpar").rglob("*") if path.is_file()}
    assert wheel == sources
    assert {Path("vitpar/recipes/digits.toml"), Path("vitpar/clusters/H100.toml"), Path("vitpar/py.typed")} <= wheel
    assert (unpacked / "vitpar_cli/main.py").is_file()


def test_the_sdist_holds_what_the_documentation_names(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    expected = {"README.md", "CONTRIBUTING.md", "CHANGELOG.md", "LICENSE", "Makefile", "constraints.txt"}
    expected |= {"docs/strategies.md", "examples/own_loop.py", "experiments/digits.toml", "tests/conftest.py"}
    assert expected <= names
    assert not [name for name in names if name.startswith(("runs/", "data_shards/")) and not name.endswith(".md")]


@pytest.mark.parametrize(
    ("words", "printed"),
    [
        (["plan", "pp2xtp2xdp2", "--recipe", "digits"], "pp2xtp2xdp2"),
        (["search", "--cluster", "2xH100", "--model", "vit_small_patch16_224", "--batch-size", "64"], "H100"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_commands_run_from_the_wheel(unpacked: Path, tmp_path: Path, words: list[str], printed: str) -> None:
    code = f"import sys, vitpar; assert vitpar.__file__.startswith({str(unpacked)!r}); "
    code += "from vitpar_cli.main import main; main()"
    environment = {**os.environ, "PYTHONPATH": str(unpacked)}
    done = subprocess.run(
        [sys.executable, "-c", code, *words], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0 and printed in done.stdout, done.stderr
