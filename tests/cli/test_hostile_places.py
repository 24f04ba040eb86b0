"""Output and run folders on full devices, in folders of the system, in ASCII; batches that no memory holds."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.small_data import pack_small


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pack_small(tmp_path_factory.mktemp("data"))


def vitpar(*words: str, stdout: int = subprocess.PIPE, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command, with further environment variables."""
    return subprocess.run(
        [sys.executable, "-m", "vitpar_cli.main", *words],
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        env={**os.environ, **environment},
        timeout=120,
    )


@pytest.mark.parametrize("words", [("--version",), ("plan", "pp2xtp2xdp2")], ids=" ".join)
def test_a_full_device_behind_the_output_is_one_sentence(words: tuple[str, ...]) -> None:
    with open("/dev/full", "w") as full:
        done = vitpar(*words, stdout=full.fileno())
    assert (done.returncode, done.stderr) == (2, "error: cannot write: No space left on device: free some space\n")


def test_a_terminal_that_knows_ascii_alone_gets_question_marks() -> None:
    done = vitpar("plan", "pp2xtp2", PYTHONIOENCODING="ascii")
    assert done.returncode == 0 and "stage 1 ?  2     3   ?" in done.stdout, done.stderr


@pytest.mark.parametrize("folder", ["/proc/run", "/dev/null/run"])
def test_a_run_folder_that_cannot_be_made_is_one_sentence(data: Path, folder: str) -> None:
    words = ("--set", "model.image_size=8", "--set", "model.patch_size=4", "--steps", "1", "--run-dir", folder)
    done = vitpar("train", "--recipe", "digits", "--data", str(data), *words)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert f"error: the run folder '{folder}' cannot be" in done.stderr and "--run-dir" in done.stderr


def test_a_batch_that_no_memory_holds_is_refused_before_it_starts(data: Path) -> None:
    done = vitpar("train", "--data", str(data), "--batch-size", "100000", "--model", "vit_base_patch16_224")
    assert done.returncode == 2, done.stderr
    assert "a step is predicted to need" in done.stderr and "use a smaller --batch-size" in done.stderr
