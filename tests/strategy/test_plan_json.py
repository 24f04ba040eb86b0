"""Plans as JSON: the file format, the round trip, and errors that name the key."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.sentences import says
from vitpar.errors import StrategyError
from vitpar.strategy import ROLES, SCHEDULES, Axis, Plan, Strategy
from vitpar.strategy.plan_json import plan_from_json, plan_to_json, read_plan, write_plan

TEXT = """\
{
  "vitpar_plan": 2,
  "strategy": "tp2xpp2xdp+ckpt",
  "schedule": "gpipe",
  "virtual_stages": 1,
  "microbatches": 4,
  "microbatch_size": null,
  "split": [7, 5]
}
"""
FORMER = {
    **{"vitpar_plan": 1, "pp": 2, "pp_index": 1, "schedule": "gpipe", "microbatches": 4, "split": [7, 5]},
    "layers": [{"layers": "*", "axes": [["tp", 2], ["dp", None]], "depth": None, "checkpoint": "full", "zero": 0}],
}
"""PLAN as vitpar wrote it before."""
PLAN = Plan(
    layers=(("*", Strategy((Axis("tp", 2), Axis("dp", None)), checkpoint="full")),),
    pp=2,
    pp_index=1,
    schedule="gpipe",
    microbatches=4,
    split=(7, 5),
)
COUNTS = st.integers(1, 99)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    roles = draw(st.lists(st.sampled_from([role for role in ROLES if role != "pp"]), unique=True))
    opened = draw(st.integers(0, 5))  # at most one degree is open
    axes = tuple(
        Axis(role, None if number == opened else draw(st.integers(2, 16))) for number, role in enumerate(roles)
    )
    flags: dict[str, Any] = {"checkpoint": draw(st.sampled_from([None, "full", "selective"]))}
    if "dp" in roles and "fsdp" not in roles:
        flags["zero"] = draw(st.integers(0, 2))
    if "tp" in roles:
        flags["sequence_parallel"] = draw(st.booleans())
    strategy = Strategy(axes, offload=draw(st.booleans()), **flags)
    groups = [("*", strategy)]
    if not any(axis.degree is None for axis in axes) and draw(st.booleans()):
        other = Strategy((Axis("dp", strategy.size),) if strategy.size > 1 else (), checkpoint="selective")
        groups.append((draw(st.sampled_from(["embed", "head", "3", "2-5", "stage2"])), other))
    uniform = len({strategy for _, strategy in groups}) == 1
    pp = draw(st.integers(1, 16) if strategy.is_open else st.none() | st.integers(1, 16))
    return Plan(
        layers=tuple(groups),
        pp=pp,
        pp_index=0 if pp == 1 or not uniform else draw(st.integers(0, len(axes))),
        schedule=draw(st.sampled_from(sorted(SCHEDULES))),
        virtual_stages=draw(COUNTS),
        microbatches=draw(st.none() | COUNTS),
        microbatch_size=draw(st.none() | COUNTS),
        split=draw(st.sampled_from(["even", "balanced"]) | st.lists(COUNTS).map(tuple)),
    )


@given(plans())
def test_json_round_trip(plan: Plan) -> None:
    assert plan_from_json(json.loads(json.dumps(plan_to_json(plan)))) == plan


def test_plan_file_is_human_readable_and_reads_back(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text("an older plan")
    write_plan(path, PLAN)
    assert path.read_text() == TEXT
    assert read_plan(path) == PLAN
    assert [entry.name for entry in tmp_path.iterdir()] == ["plan.json"]


def test_missing_keys_take_the_defaults_and_the_former_format_is_read() -> None:
    assert plan_from_json({"vitpar_plan": 2, "strategy": "dp1"}) == Plan()
    assert plan_from_json(FORMER) == PLAN
    layers = [{"layers": "0-3", "axes": [["tp", 2]]}, {"layers": "*", "axes": [["dp", 2]], "zero": 1}]
    assert str(plan_from_json({"vitpar_plan": 1, "layers": layers})) == "pp1: 0-3=tp2, *=dp2+zero1"
    for change in ({"layers": 3}, {"layers": [{"layers": "*", "axes": [["dp", 2]], "zero": 7}]}, {"pp": "2"}):
        with says("the layers of this plan of format 1 cannot be read: name its strategy instead"):
            plan_from_json(FORMER | change)


def test_failed_write_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "plan.json"
    path.write_text("an older plan")

    def full_disk(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full_disk)
    with pytest.raises(StrategyError, match=r"^cannot write the plan .*plan\.json: No space left on device$"):
        write_plan(path, PLAN)
    assert path.read_text() == "an older plan"
    assert [entry.name for entry in tmp_path.iterdir()] == ["plan.json"]


def test_write_without_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in ("absent", "file"):
        with pytest.raises(StrategyError, match=r"^cannot write the plan .*: (No such file or|Not a) directory$"):
            write_plan(tmp_path / folder / "plan.json", PLAN)


WRONG = "the plan is wrong:"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"microbatchs": 4}, f"{WRONG} unknown key 'microbatchs': correct it"),
        ({"vitpar_plan": 3}, "'vitpar_plan' is 3: this vitpar reads plans of format 2"),
        *(({key: None}, f"{WRONG} {key}: Input should be a valid …") for key in ("vitpar_plan", "virtual_stages")),
        *(
            ({"microbatches": value}, f"{WRONG} microbatches: Input should…")
            for value in ("2", True, 2.0, [4], "a" * 999)
        ),
        ({"strategy": "dpp2"}, "unknown role 'dpp'…"),
        ({"schedule": 1}, f"{WRONG} schedule: Input should be a valid string: correct it"),
        ({"split": [6, "6"]}, f"{WRONG} split…"),
    ],
)
def test_refusals_name_the_key(change: dict[str, Any], message: str) -> None:
    with says(message):
        plan_from_json(plan_to_json(PLAN) | change)


FILES = [
    (b"{}", f"{{path}}: {WRONG} vitpar_plan: Field required: correct it"),
    (b"[]", "{path} is not a plan: it has no JSON object"),
    *((content, "{path} is not JSON: …") for content in (b"", b'{"pp": ', b"\xff\xfe")),
    (None, "cannot read the plan {path}: No such file or directory"),
]


@pytest.mark.parametrize(("content", "message"), FILES)
def test_file_that_is_not_a_plan_is_refused(tmp_path: Path, content: bytes | None, message: str) -> None:
    path = tmp_path / "plan.json"
    if content is not None:
        path.write_bytes(content)
    with says(message.format(path=path)):
        read_plan(path)
