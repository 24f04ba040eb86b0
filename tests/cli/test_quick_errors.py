"""Mistakes that can be found without torch are refused without importing it, which takes seconds."""

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = "import sys; sys.modules['torch'] = None; from vitpar_cli.main import main; sys.exit(main())"
"""Program that runs the command line with an unimportable torch."""


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train", "--mesh", "foo"], "unknown role 'foo'"),
        (["train", "--data", "gone"], "no data set at 'gone'"),
        (["train", "--track", "mlflow"], "unknown tracker 'mlflow': use tensorboard, wandb or trackio"),
        (["check", "--mesh", "dp2xfoo"], "unknown role 'foo'"),
        (["bench", "--mesh", "foo"], "unknown role 'foo'"),
        (["plan", "foo"], "unknown role 'foo'"),
        (["plan", "dp2", "--hardware", "gone.json"], "cannot read the hardware profile gone.json"),
        (["search"], "cannot read the hardware profile hardware.json"),
        (["scaling"], "cannot read the hardware profile hardware.json"),
        (["eval", "--checkpoint", "gone"], "'gone' holds no weights"),
        (["checkpoint", "list", "gone"], "there is no folder 'gone'"),
        (["checkpoint", "info", "gone"], "there is no folder 'gone'"),
        (["data", "info", "gone"], "no data set at 'gone'"),
        (["data", "verify", "gone"], "no data set at 'gone'"),
        (["report", "gone"], "there is no run 'gone'"),
        (["runs", "gone"], "there is no folder 'gone'"),
        (["settings", "train.sed"], "unknown setting 'train.sed'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_mistakes_are_refused_without_importing_torch(words: list[str], message: str, tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, *words], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2 and message in done.stderr, done.stderr
