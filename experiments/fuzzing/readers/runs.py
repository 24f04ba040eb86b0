"""Target: folders of runs, read for a report and for a list."""

import json
from pathlib import Path

from fuzzing import oracle
from fuzzing.case import Case, Target, read_folder
from helpers.run_folders import eval_row, start_line, train_row, write_run
from vitpar.planner.cost import pipeline  # noqa: F401, a report imports it, and torch, when it draws a pipeline
from vitpar.runs.folder import RunRecord, refuse_other_folders
from vitpar.runs.listing import runs_in, summary
from vitpar.runs.page import report

SCRIPT = "<script>alert(1)</script><img src=x>"


class Run(Target):
    """Folders of runs: log, metrics, recipe, plan and environment, with and without a pipeline."""

    def make(self, home: Path) -> None:
        rows, self.seeds = [*map(train_row, range(1, 5)), eval_row(4)], []
        for mesh in ("pp2xtp2", "fsdp4"):
            log = [
                start_line("dp2", 4),
                "saving step 2: training waited 0.010 s",
                "warning: the learning rate is large",
            ]
            log += ["resuming from run/checkpoints/step_2: 2 steps done", start_line(mesh, 4)]
            log.append("done  val loss 0.5000  top-1 50.00%  top-5 99.00%  weights run/weights")
            folder = write_run(home / mesh, rows, mesh=mesh, log=log, steps=4, attention={"backend": "math"})
            self.seeds.append(read_folder(folder))
        environment = json.dumps({"command": [SCRIPT], "torch": SCRIPT, "devices": [SCRIPT]}).encode()
        restarts = "".join(
            f"2026-01-02 03:04:08 resuming from {SCRIPT}: {i} steps done\n" for i in range(20_000)
        ).encode()
        endless = b'{"kind": "train", "step": 1e999}\n' * 9_000
        hostile = {"env.json": environment, "log.txt": restarts, "metrics.jsonl": endless}
        self.triggers = [self.case(0, {name: data}) for name, data in hostile.items()]

    def read(self, case: Case, place: Path) -> None:
        refuse_other_folders(place)
        html = report([RunRecord(place), RunRecord(place)])
        if html.count("<script") != 3 or "<img" in html:
            raise oracle.Wrong("a text of the run became an element of the page")
        list(map(summary, runs_in(place)))
