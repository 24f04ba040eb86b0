"""Out of device memory in a run of several ranks: one error line, whichever rank and phase fails."""

import os
import sys
from pathlib import Path

import pytest

from helpers.command_line import Command
from helpers.ranks import exits, two_ranks

# Python imports sitecustomize at start-up. In the failing rank it raises the error of CUDA's allocator.
SITE = """
import os
if os.environ.get("RANK", "0") == os.environ.get("FAILING_RANK") and "FAILING_PHASE" in os.environ:
    import torch
    def fail(*_, **__):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    if os.environ["FAILING_PHASE"] == "build":
        import vitpar.training.build
        vitpar.training.build.parallelize_checked = fail
    else:
        from vitpar.models.vit.layers import Block
        compute = Block.forward
        Block.forward = lambda self, x, **more: compute(self, x, **more) if x.is_meta else fail()
"""


@pytest.fixture(scope="module")
def place(place: Path) -> Path:
    (place / "site").mkdir()
    (place / "site" / "sitecustomize.py").write_text(SITE)
    return place


WORDS = ("--model", "vit_nano_patch4_8", "--batch-size", "8", "--steps", "2", "--set", "data.workers=0")


def train(place: Path) -> None:
    """Train a rank that SITE changes."""
    from vitpar_cli.main import main

    os.chdir(place)
    exec(SITE, {})
    sys.argv = ["vitpar", "train", "--data", "data", *WORDS, "--mesh", "pp2", "--run-dir", "forked"]
    main()


def test_rank_without_memory_says_so(place: Path) -> None:
    failing = {"FAILING_RANK": "1", "FAILING_PHASE": "step"}
    _, (code, errors) = exits(train, [world | failing for world in two_ranks()], place)
    assert code == 2 and errors.count("\n") == 1, errors
    assert errors.startswith("error: CUDA is out of memory on rank 1: a step is predicted to need ")


@pytest.mark.slow
def test_a_command_whose_rank_lacks_memory_prints_one_error_line(
    place: Path, vitpar: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("PYTHONPATH", place / "site"), ("FAILING_RANK", 1), ("FAILING_PHASE", "build")):
        monkeypatch.setenv(name, str(value))
    done = vitpar("train", "--data", "data", *WORDS, "--mesh", "dp2")
    assert done.returncode == 2
    (line,) = (line for line in done.stderr.splitlines() if "memory" in line)
    assert line.startswith("error: CUDA is out of memory on rank 1: a step is predicted to need ")
    assert "--microbatches" in line and "+ckpt" in line
    assert "Traceback" not in done.stderr
