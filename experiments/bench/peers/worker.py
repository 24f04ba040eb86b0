"""One contender in a process of its own: ``python -m bench.peers.worker JOB`` (JSON of ``bench.peers.job.Job``).

Answers, a line of JSON each: ``missing`` where what it needs cannot be imported, ``failed``, ``full`` where memory
ended, else what ``bench.peers.turns`` says.
"""

import importlib
import os
import sys
import traceback

import torch

from bench.peers.job import Job
from bench.peers.turns import Turns, pipes


def main(text: str) -> None:
    """See the module's docstring."""
    asked, answers = pipes()
    job = Job.from_json(text)
    turns = Turns(torch.device(job.device), asked, answers)
    try:
        module = importlib.import_module(f"bench.peers.{job.contender}")
    except Exception as error:  # packages fail to import in ways of their own
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
        os._exit(0)  # threads of a loop that was left may be waiting for each other


def state_bytes(job: Job) -> int:
    """Bytes of parameters, gradients and AdamW's two moments in float32."""
    from vitpar.models.vit import ViT

    with torch.device("meta"):
        return 16 * sum(p.numel() for p in ViT(job.config).parameters())


def one_line(error: BaseException) -> str:
    """The kind of error and the first line of what it says."""
    first = next(iter(str(error).splitlines()), "")
    return f"{type(error).__name__}: {first}"[:300]


if __name__ == "__main__":
    main(sys.argv[1])
