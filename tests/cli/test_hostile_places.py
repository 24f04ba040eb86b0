"""Output and run folders on full devices, in folders of the system, in ASCII; batches that no memory holds."""

import subprocess
import sys
from pathlib import Path

import pytest

from helpers.command_line import clean_environment, run
from helpers.small_data import pack_small


@pytest.mark.parametrize("words", [("--version",), ("plan", "pp2xtp2xdp2")], ids=" ".join)
def test_a_full_device_behind_the_output_is_one_sentence(words: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "vitpar_cli.main", *words]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, env=clean_environment(), stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (2, "error: cannot write: No space left on device: free some space\n")


def test_a_terminal_that_knows_ascii_alone_gets_question_marks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    done = run(tmp_path, ("plan", "pp2xtp2"))
    assert done.returncode == 0 and "stage 1 ?  2     3   ?" in done.stdout, done.stderr


def test_a_run_folder_that_cannot_be_made_is_one_sentence(tmp_path: Path) -> None:
    data = ("train", "--recipe", "digits", "--data", str(pack_small(tmp_path)))
    for folder in ("/proc/run", "/dev/null/run"):
        words = ("--set", "model.image_size=8", "--set", "model.patch_size=4", "--steps", "1", "--run-dir", folder)
        done = run(tmp_path, (*data, *words))
        assert done.returncode == 2 and "Traceback" not in done.stderr
        assert f"error: the run folder '{folder}' cannot be" in done.stderr and "--run-dir" in done.stderr


def test_a_batch_that_no_memory_holds_is_refused_before_it_starts(tmp_path: Path) -> None:
    words = ("--batch-size", "100000", "--model", "vit_base_patch16_224")
    done = run(tmp_path, ("train", "--data", str(pack_small(tmp_path)), *words))
    assert done.returncode == 2, done.stderr
    assert "a step is predicted to need" in done.stderr and "use a smaller --batch-size" in done.stderr
