"""Compare the idle time of pipelines with theory.

    python experiments/bench_plans.py                        # two minutes on two cores
    python experiments/bench_plans.py --quick                # two schedules: to see the program run

The idle share of a step under pp4 is compared with the theory of `vitpar plan`. The stages sleep instead of computing,
so that they need no cores; forward, input gradients and weight gradients take equally long. The excess over theory is
the cost of sending and scheduling.

Tests compare traffic and memory of plans with theory: `tests/strategy/test_traffic.py` every collective of a layer,
`tests/planner/test_planner_run.py` the memory of each rank.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bench.harness import Report, Spread, answer, is_rank, on_ranks, parser
from vitpar.parallel.mesh import pipeline_mesh
from vitpar.parallel.pipeline import Stage, build_schedule
from vitpar.planner.cost.pipeline import idle_share
from vitpar.strategy import SCHEDULES, parse, stages_of_rank

CPU = torch.device("cpu")
PIPELINES = ("gpipe", "1f1b", "interleaved1f1b", "interleavedzerobubble", "zbvzerobubble", "dualpipev")


def main() -> int:
    """Read the options, measure and print the table."""
    options = parser(__doc__)
    options.add_argument("--quick", action="store_true", help="two schedules")
    given = options.parse_args()
    report, found = Report(given.json), []
    for name in PIPELINES[: 2 if given.quick else None]:
        found.append(on_ranks(__file__, 4, name, OMP_NUM_THREADS="1"))
        report.keep("bubble", found)
    cells = [
        [row["schedule"], str(row["microbatches"]), Spread.of(row["idle"]).text(3), f"{row['theory']:.3f}"]
        for row in found
    ]
    report.show("bubble", ("schedule", "micro-batches", "idle, measured", "in theory"), cells, found)
    return 0


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: float, backward: float) -> Tensor:
        ctx.seconds = backward
        time.sleep(forward)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.seconds)
        return gradient.clone(), None, None


class Sleeper(nn.Module):
    """A stage that sleeps for `seconds` in forward, and as long for its input's and for its weight's gradient."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.weight, self.seconds = nn.Parameter(torch.zeros(())), seconds

    def forward(self, x: Tensor) -> Tensor:
        # Images require no gradient, but in a real first stage backward also passes through the blocks.
        if not x.requires_grad:
            x = x.detach().requires_grad_()
        return _Sleep.apply(x, self.seconds, self.seconds) + _Sleep.apply(self.weight, 0.0, self.seconds)


def idle(name: str, microbatches: int = 8, steps: int = 6, slot: float = 0.08) -> dict[str, Any]:
    """Measure the idle share of a rank in each step of pp4 after the first.

    name: schedule. slot: seconds of a micro-batch's forward on one rank.
    """
    virtual = 1 if SCHEDULES[name].stages == "one" else 2
    plan = replace(parse("pp4"), schedule=name, virtual_stages=virtual, microbatches=microbatches)
    pipe, seconds = pipeline_mesh(plan, "cpu"), slot / virtual
    shape = partial(torch.empty, 1, 8, device="meta")
    mine = stages_of_rank(pipe.get_local_rank("pp"), plan)
    stages = [
        Stage(Sleeper(seconds), index, plan.num_stages, shape(), shape(), CPU, pipe.get_group("pp")) for index in mine
    ]
    running = build_schedule(plan, stages, microbatches, lambda y, target: y.sum())
    given = [torch.zeros(microbatches, 8)] if 0 in mine else []
    last: dict[str, Any] = {"target": torch.zeros(microbatches, 1)} if plan.num_stages - 1 in mine else {}
    shares = []
    for _ in range(steps):
        dist.barrier()
        begun = time.perf_counter()
        running.step(*given, return_outputs=False, **({**last, "losses": []} if last else {}))
        dist.barrier()
        shares.append(1 - 3 * slot * microbatches / (time.perf_counter() - begun))
    theory = idle_share(plan, microbatches)
    return {"schedule": name, "microbatches": microbatches, "idle": shares[1:], "theory": theory}


if __name__ == "__main__":
    if is_rank():
        answer(idle)
    sys.exit(main())
