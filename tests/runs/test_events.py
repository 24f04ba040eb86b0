"""Events of a run; tests/training/saving/test_frozen_runs.py reads those of a real run."""

from helpers.run_folders import event, start
from vitpar.runs.metrics import events_of


def test_a_complete_run_ends_with_done() -> None:
    found = events_of([start("pp2: *=tp2, head=dp2", 1200), event("save", 1200), event("done", 1200)])
    (begun,) = found.starts
    assert (begun.plan, begun.steps, begun.batch_size, begun.step) == ("pp2: *=tp2, head=dp2", 1200, 128, 0)
    assert (begun.model, begun.parameters, begun.device) == ("vit_custom", 203_530, "cpu")
    assert found.saves == [1200] and found.end == "done"


def test_a_resumed_run_has_the_end_and_warnings_of_its_last_part() -> None:
    rows = [start("dp2", 60), event("save", 20), event("warning", text="old"), event("error", text="diverged")]
    failed = events_of(rows)
    assert (failed.end, failed.words, failed.saves, failed.warning) == ("error", "diverged", [20], "old")
    again = [start("tp2", 60, 20, "parallel.mesh was dp2 and is tp2"), event("warning", text="slow"), event("save", 60)]
    found = events_of([*rows, *again, event("stopped", text="stopped by SIGTERM")])
    assert (found.end, found.words, found.saves) == ("stopped", "stopped by SIGTERM", [20, 60])
    assert found.warning == "slow"
    assert [(one.plan, one.step, one.changed) for one in found.starts] == [
        ("dp2", 0, ""),
        ("tp2", 20, "parallel.mesh was dp2 and is tp2"),
    ]


def test_rows_of_strangers_are_left_out() -> None:
    odd = [{"event": "start", "plan": 3}, {"event": ["done"]}, {"event": "save", "step": "x"}, {"event": "other"}]
    odd.append(start("dp2", 60) | {"parameters": 10**400})
    found = events_of(odd)
    assert (found.starts, found.saves, found.end) == ([], [], "")
