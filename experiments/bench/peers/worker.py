"""Process of one contender: ``python -m bench.peers.worker JOB`` (JSON of ``bench.peers.job.Job``).

Its answers are lines of JSON: ``missing`` if an import failed, ``full`` if it ran out of memory, ``failed`` for other
errors, or the answers of ``bench.peers.turns``.
"""

import importlib
import os
import sys
import traceback

import torch

from bench.peers.job import Job
from bench.peers.turns import Turns, pipes


def main(text: str) -> None:
    """Train the contender of the JSON job `text` until the input ends."""
    asked, answers = pipes()
    job = Job.from_json(text)
    turns = Turns(torch.device(job.device), asked, answers)
    try:
        module = importlib.import_module(f"bench.peers.{job.contender}")
    except Exception as error:  # importing a package may raise any error
        turns.tell(missing=one_line(error))
        return
    try:
        if job.limit_bytes is not None and state_bytes(job) > job.limit_bytes:
            raise torch.OutOfMemoryError(f"{state_bytes(job)} bytes of {job.limit_bytes}")
        module.train(job, turns)
    except (torch.OutOfMemoryError, MemoryError) as error:
        turns.tell(full=one_line(error))
    except Exception as error:
        traceback.print_exc()
        turns.tell(failed=one_line(error))
    finally:
        sys.stderr.flush()
        os._exit(0)  # threads of an interrupted loop may deadlock at a normal exit


def state_bytes(job: Job) -> int:
    """Return the bytes of parameters, gradients and AdamW's two moments in float32."""
    from vitpar.models.layers import LayeredModel

    with torch.device("meta"):
        return 16 * sum(p.numel() for p in LayeredModel(job.config).parameters())


def one_line(error: BaseException) -> str:
    """Return the class of an error and the first line of its message."""
    first = next(iter(str(error).splitlines()), "")
    return f"{type(error).__name__}: {first}"[:300]


if __name__ == "__main__":
    main(sys.argv[1])
