"""Process of one contender: ``python -m bench.peers.worker JOB`` (JSON of ``bench.peers.job.Job``).

Answers are lines of JSON: ``missing`` if an import failed, ``full`` if memory ran out, ``failed`` for other errors.
Else ``parameters`` and ``version`` when it is ready. Then it reads requests
``{"steps": n, "untimed": m, "losses": bool}``,
makes m + n steps, and answers with the total of the last n: `wall` and `cpu` (all threads) in seconds, and `faults`,
minor page faults. They are measured in this process after the device has finished. The end of the input ends it.
"""

import importlib
import json
import os
import resource
import sys
import time
import traceback
from collections.abc import Iterator
from itertools import cycle
from typing import Any

import torch
from torch import Tensor

from bench.peers import NEEDS, contenders
from bench.peers.job import Job


def main(text: str) -> None:
    """Train the contender of the JSON job `text` until the input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # prints of the libraries must not mix with the answers
    kind = "missing"
    try:
        job = Job.from_json(text)
        importlib.import_module(NEEDS.get(job.contender, "torch"))  # it may raise any error
        kind = "failed"
        for answer in turns(job):
            print(json.dumps(answer), file=answers, flush=True)
    except (torch.OutOfMemoryError, MemoryError) as error:
        print(json.dumps({"full": one_line(error)}), file=answers, flush=True)
    except Exception as error:
        traceback.print_exc()
        print(json.dumps({kind: one_line(error)}), file=answers, flush=True)


def turns(job: Job) -> Iterator[dict[str, Any]]:
    """Yield an answer when the contender is ready, and after each turn."""
    model, step, version = getattr(contenders, f"make_{job.contender}")(job)
    yield {"parameters": sum(p.numel() for _, p in model.named_parameters()), "version": version}
    feed, gpu = cycle(contenders.batches(job)), job.device == "cuda"

    def make(steps: int) -> list[Tensor]:
        return [step(*next(feed))[0].detach().clone() for _ in range(steps)]  # a compiled step may overwrite its loss

    for line in sys.stdin:
        turn = json.loads(line)
        losses = make(turn["untimed"])
        if gpu:
            torch.cuda.reset_peak_memory_stats()
        begun = read(gpu)
        losses += make(turn["steps"])
        answer: dict[str, Any] = {name: end - begun[name] for name, end in read(gpu).items()}
        if turn["losses"]:
            answer["losses"] = [loss.item() for loss in losses]
        if gpu:
            answer["memory_bytes"] = torch.cuda.max_memory_allocated()
            torch.cuda.empty_cache()  # leave the memory to the next contender
        yield answer


def read(gpu: bool) -> dict[str, float]:
    """Return the clocks and the page faults of this process."""
    if gpu:
        torch.cuda.synchronize()
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    return {"wall": time.perf_counter(), "cpu": time.process_time(), "faults": faults}


def one_line(error: BaseException) -> str:
    """Return the class of an error and the first line of its message."""
    first = next(iter(str(error).splitlines()), "")
    return f"{type(error).__name__}: {first}"[:300]


if __name__ == "__main__":
    main(sys.argv[1])
