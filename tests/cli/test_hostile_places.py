"""Output and run folders on full devices, in folders of the system, in ASCII; batches that no memory holds."""

import io
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.command_line import clean_environment, run
from helpers.small_data import pack_small
from vitpar_cli.main import main


@pytest.mark.parametrize("words", [("--version",), ("models",)], ids=" ".join)
def test_a_full_device_behind_the_output_is_one_sentence(words: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "vitpar_cli.main", *words]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, env=clean_environment(), stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (2, "error: cannot write: No space left on device: free some space\n")


def test_a_terminal_that_knows_ascii_alone_gets_question_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(file, "ascii", write_through=True))
    monkeypatch.setattr(sys, "argv", ["vitpar", "plan", "pp2xtp2"])
    with pytest.raises(SystemExit):
        main()
    assert b"stage 1 ?  2     3   ?" in file.getvalue()


def test_a_run_folder_that_cannot_be_made_is_one_sentence(tmp_path: Path) -> None:
    words = ("train", "--recipe", "digits", "--data", str(pack_small(tmp_path)), "--set", "model.image_size=8")
    for folder in ("/proc/run", "/dev/null/run"):
        done = run(tmp_path, (*words, "--set", "model.patch_size=4", "--steps", "1", "--run-dir", folder))
        assert done.returncode == 2 and "Traceback" not in done.stderr
        assert f"error: the run folder '{folder}' cannot be" in done.stderr and "--run-dir" in done.stderr
