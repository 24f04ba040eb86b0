"""Strategies and plans from untrusted sources: absurd values are refused quickly, with a short error."""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from helpers.command_line import refusal
from helpers.hostile_files import accepted
from helpers.hostile_pieces import LONG, WORDS, pairs
from helpers.small_data import pack_small
from vitpar.data import Labels
from vitpar.errors import StrategyError
from vitpar.launch import expand_hosts
from vitpar.limits import MAX_PLAN_BYTES, MAX_QUOTED_CHARS
from vitpar.models import model_config
from vitpar.strategy import Axis, Plan, Strategy, batch_arithmetic, parse
from vitpar.strategy.galvatron import from_galvatron, read_galvatron
from vitpar.strategy.plan_json import plan_from_json, plan_to_json, read_plan
from vitpar.strategy.stages import split_blocks
from vitpar.strategy.validate import validate
from vitpar.text import divisors

pytestmark = pytest.mark.timeout(20)
HUGE = 10**400
DEEP = model_config("vit_custom", patch_size=16, embed_dim=64, depth=1024, num_heads=4)


def refused(make: Callable[[], Any], message: str) -> str:
    with pytest.raises(StrategyError, match=message) as caught:
        make()
    said = str(caught.value)
    assert len(said) < 3 * MAX_QUOTED_CHARS + 400 and "\n" not in said
    return said


# strings


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dp999999999", "the degree of 'dp' at position 1 of .* is 999999999: use 1 to 65,536"),
        ("dp2xtp65537", "the degree of 'tp' at position 5 of .* is 65537: use 1 to 65,536"),
        ("tp999999999+2.5d", "is 999999999: use 1 to 65,536"),
        ("pp999999999: *=dp2", "the degree of 'pp' at position 1 .* is 999999999"),
        ("dp60000xtp60000", "dp60000xtp60000 takes 3,600,000,000 ranks: use at most 65,536"),
        ("pp1: *=fsdp60000xtp2", "fsdp60000xtp2 takes 120,000 ranks: use at most 65,536"),
        ("pp65536: *=dp2", "pp65536xdp2 takes 131,072 ranks: use at most 65,536"),
        ("pp1: 0-999999999=dp2", "'0-999999999' names block 999999999: models have at most 1,024 blocks"),
        ("pp1: 1024=dp2", "'1024' names block 1024: models have at most 1,024 blocks"),
        ("pp1: " + ",".join(["0-1023=dp2"] * 5_000), "block 0 is in two groups"),
        ("pp1: " + ",".join(f"{i % 1024}=dp2" for i in range(7_000)), "block 0 is in two groups"),
        ("pp1: " + ",".join(["embed=dp2"] * 6_000), "'embed' is in two groups"),
        ("x" * 60_000, "stray 'x' at position 1 of"),
        ("q" * 60_000, "unknown role 'q{198}…' at position 1 of 'q{198}…'"),
        ("dp2" + "+" * 60_000, "empty flag at position 4 of"),
        ("dp2+" + "q" * 60_000, "unknown flag 'q{198}…' at position 5"),
        ("dp2+ckpt." + "q" * 60_000, "unknown checkpoint policy 'q{198}…'"),
        ("pp2:" + "," * 60_000, "empty group at position 5 of"),
        ("pp2:" + "=" * 60_000, "cannot read '={198}…' at position 5 of"),
        ("dp2\0" * 10_000, "is not a line of text"),
    ],
)
def test_oversized_strategy_strings_are_refused(text: str, message: str) -> None:
    refused(lambda: parse(text), message)


def test_hostile_words_of_strategies_are_read_or_refused() -> None:
    for words in pairs(*WORDS["words"]["strategy"]):
        if accepted(parse, words):
            assert parse(str(parse(words))) == parse(words)


@pytest.mark.parametrize(
    ("kind", "parser"), [("label", Labels.parse), ("hosts", expand_hosts), ("model", model_config)]
)
def test_other_hostile_words_are_read_or_refused(kind: str, parser: Callable[[str], Any]) -> None:
    for words in (*pairs(*WORDS["words"][kind]), *LONG, "x" * 10**6):
        accepted(parser, words)


@pytest.mark.parametrize("before", [0, 3, 99, 100, 101, 5_000])
def test_long_strategy_is_quoted_around_the_mistake(before: int) -> None:
    groups = "".join(f"{index}=dp2," for index in range(before % 1024))
    said = refused(lambda: parse(f"pp1: {groups}head=dp2xwrong4,{'*=dp2,' * 5_000}"), "unknown role 'wrong'")
    place = len(f"pp1: {groups}head=dp2x")
    assert f"at position {place + 1} of '" in said
    quote = said.partition(" of '")[2].partition("'")[0]
    assert len(quote) <= MAX_QUOTED_CHARS and "head=dp2xwrong4" in quote
    assert quote.startswith("…") == (place > 99) and quote.endswith("…")


def test_oversized_plan_fields_are_refused() -> None:
    for number in (65_537, 10**9, HUGE):
        refused(lambda number=number: Axis("dp", number), "the degree of 'dp' is .*: use 1 to 65,536")
        refused(lambda number=number: Plan(pp=number), "the degree of 'pp' is .*: use 1 to 65,536")
        refused(lambda number=number: parse("dp").resolve(number), "the world takes .* ranks: use at most 65,536")
        refused(lambda number=number: Plan(virtual_stages=number), "virtual_stages is .*: use 1 to 1,024")
    for number in (10**9, HUGE):
        refused(lambda number=number: Plan(microbatches=number), "microbatches is .*: use 1 to 16,777,216")
        refused(lambda number=number: Plan(microbatch_size=number), "microbatch_size is .*: use 1 to 16,777,216")
        refused(lambda number=number: batch_arithmetic(Plan(), number), "the batch size is .*: use 1 to 16,777,216")
    refused(lambda: Plan(split=(1,) * 1_025), "split has 1,025 stages: use at most 1,024")
    refused(lambda: Strategy((Axis("tp", 8),), "2.5d", HUGE), "needs tp to be 10+… times a square, not 8")


def test_largest_allowed_numbers_are_fast() -> None:
    assert divisors(1 << 24) == [1 << n for n in range(25)]
    assert divisors(36) == [1, 2, 3, 4, 6, 9, 12, 18, 36] and divisors(1) == [1]
    assert dict(parse("tp32768+2.5d").strategy.tensor_shape) == {"d": 2, "i": 128, "j": 128}
    costs = [float(1 + index % 7) for index in range(1_026)]
    assert sum(map(len, split_blocks(1_024, 512, "balanced", costs))) == 1_024
    message = (
        "schedule interleaved1f1b over pp4 cannot run 16777213 micro-batches .*: use 16777208, 16777212 or 16777216"
    )
    plan = Plan((("*", Strategy()),), 4, schedule="interleaved1f1b", virtual_stages=2, microbatches=(1 << 24) - 3)
    refused(lambda: validate(plan, DEEP, None), message)


# plan.json


def written(folder: Path, content: bytes | str) -> Path:
    path = folder / "plan.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


PLAN = plan_to_json(parse("dp2"))
LAYER = PLAN["layers"][0]


@pytest.mark.parametrize("read", [read_plan, lambda path: read_galvatron(path, 8)], ids=["plan", "galvatron"])
def test_files_that_are_not_plans_are_refused(read: Callable[[Path], Any], tmp_path: Path) -> None:
    twice = "{" + ",".join(f'"k{index}":1' for index in range(300_000)) + ',"k299999":2}'
    for content, message in (
        (twice, "key 'k299999' is repeated: give it once"),
        ('{"' + "k" * 10**6 + '": 1}', "unknown key 'k{198}…' in"),
        ("[" * 1_000_000, "is not JSON: it is nested too deeply"),
        ('{"pp": ' + "[" * 900 + "]" * 900 + "}", r"(unknown key 'pp'|'pp' in the plan is \[+…)"),
        ("[" + "1," * 10**6 + "1]", r"is \[1, 1, .*…: give an object"),
        ('"' + "x" * 10**6 + '"', 'is "x+…: give an object'),
        ('{"pp": ' + "9" * 5_000 + "}", "is not JSON: Exceeds the limit"),
        (b"\xff" * 1_000, "is not JSON"),
        (b" " * (MAX_PLAN_BYTES + 1), "it has more than 4,194,304 bytes"),
    ):
        path = written(tmp_path, content)
        refused(lambda path=path: read(path), message)
    path.unlink()
    os.mkfifo(path)
    refused(lambda: read(path), "it is not a regular file")
    refused(lambda: read(Path("/dev/zero")), "it is not a regular file")
    refused(lambda: read(tmp_path), "it is a folder")
    refused(lambda: read(tmp_path / ("x" * 5_000)), "cannot read the plan .*…: File name too long")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pp": HUGE}, "the degree of 'pp' is 10+…: use 1 to 65,536"),
        ({"pp_index": HUGE}, "pp_index is 10+… but pp can follow at most 0 axes"),
        ({"vitpar_plan": HUGE}, "'vitpar_plan' is 10+…: this vitpar reads"),
        ({"schedule": "x" * 10**6}, "unknown schedule 'x{198}…'"),
        ({"split": "x" * 10**6}, "unknown split 'x{198}…'"),
        ({"split": [1] * 10**6}, "split has 1,000,000 stages"),
        ({"layers": [LAYER] * 1_028}, "'layers' in the plan is .*…: give a list of at most 1,027 objects"),
        ({"layers": [LAYER | {"layers": "x" * 10**6}]}, "'x{198}…' is not a layer selector"),
        ({"layers": [LAYER | {"axes": [["dp", 2]] * 10**6}]}, r"'axes' in layers\[0\] is .*…: give a list"),
        ({"layers": [LAYER | {"axes": [["x" * 10**6, 2]]}]}, "unknown role 'x{198}…'"),
        ({"layers": [LAYER | {"axes": [["tp", 10**18]], "tensor_mode": "2.5d"}]}, "the degree of 'tp' is 10+: use 1"),
        ({"layers": [LAYER | {"tensor_mode": "x" * 10**6}]}, "unknown tensor mode 'x{198}…'"),
        ({"layers": [LAYER | {"checkpoint": "x" * 10**6}]}, "unknown checkpoint policy 'x{198}…'"),
        ({"layers": [LAYER | {"zero": HUGE}]}, "zero is 10+…: use 0, 1 or 2"),
        ({"layers": [LAYER | {"depth": HUGE}]}, r"depth 10+… is given with tensor mode 1d"),
    ],
)
def test_oversized_plan_files_are_refused(change: dict[str, Any], message: str) -> None:
    refused(lambda: plan_from_json(PLAN | change), message)


# Galvatron's


BLOCKS = dict.fromkeys(("tp_sizes_enc", "tp_consecutive_flags"), "1,1") | {"dp_types_enc": "0,0"}
GALVATRON = BLOCKS | {"pp_deg": 1, "global_bsz": 16, "chunks": 1}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pp_deg": HUGE}, "'pp_deg' in .* is 10+…: give a whole number from 1 to 65,536"),
        ({"vtp": 10**6}, "'vtp' in .* is 1000000: give a whole number from 1 to 65,536"),
        ({"global_bsz": HUGE}, "'global_bsz' in .* is 10+…: give a whole number from 1 to 16,777,216"),
        ({"chunks": 10**9}, "'chunks' in .* is 1000000000: give a whole number"),
        ({"global_bsz": float("nan")}, "'global_bsz' in .* is NaN: give a whole number"),
        ({"global_bsz": float("inf")}, "'global_bsz' in .* is Infinity: give a whole number"),
        ({"tp_sizes_enc": ",".join("1" * 1_025)}, 'is "1,.*…: give at most 1,024 whole numbers as text'),
        ({"pp_division": ",".join("1" * 10**6)}, 'is "1,.*…: give at most 1,024 whole numbers as text'),
        ({"tp_sizes_enc": " " * 10**6}, "give at most 1,024 whole numbers"),
        ({"pipeline_type": "x" * 10**6}, "'pipeline_type' in .* is \"x+…: give"),
    ],
)
def test_oversized_galvatron_plans_are_refused(change: dict[str, Any], message: str) -> None:
    refused(lambda: from_galvatron(GALVATRON | change, 8), message)


def test_oversized_world_for_a_galvatron_plan_is_refused() -> None:
    refused(lambda: from_galvatron(GALVATRON, 10**18), "the world takes 1,000,000,000,000,000,000 ranks: use at most")


# commands


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("plan dp999999999", "is 999999999: use 1 to 65,536"),
        ("train --steps 1 --mesh dp999999999 --data {data}", "is 999999999: use 1 to 65,536"),
        ("check --mesh dp999999999 --device cpu", "is 999999999: use 1 to 65,536"),
        ("bench --mesh tp999999999+2.5d --device cpu", "is 999999999: use 1 to 65,536"),
        ("plan dp --world-size 999999999", "the world takes 999,999,999 ranks: use at most 65,536"),
        ("plan pp2 --microbatches 999999999", "microbatches is 999999999: use 1 to 16,777,216"),
        (
            "plan pp2 --schedule interleaved1f1b --virtual-stages 999999999",
            "virtual_stages is 999999999: use 1 to 1,024",
        ),
        ("plan pp2 --split 9,²", "unknown split '9,²': use even, balanced or the blocks of each stage"),
        (f"plan pp2 --split {'9' * 5_000}", "unknown split '9+…'"),
        (f"plan pp2 --split {','.join('9' * 2_000)}", "split has 2,000 stages"),
        (f"plan {'x' * 100_000}.json", "cannot read the plan x+…: File name too long"),
        ("profile hardware --ranks 999999999 --device cpu", "is 999999999: use 1 to 65,536"),
        ("profile model --ranks 999999999 --device cpu", "the world takes 999,999,999 ranks: use at most 65,536"),
        ("search --cluster 99999x99xH100", "9,899,901 ranks: use at most 65,536"),
        ("search --cluster 8xH100 --batch-size 1000000000000", "--batch-size .* use 1 to 16,777,216"),
        (f"search --cluster 8xH100 --batch-size {'9' * 5_000}", "--batch-size 9+… is not a number"),
        ("scaling --cluster 8xH100 --ranks 999999999", "--ranks .* use 1 to 65,536"),
        ("scaling --cluster 8xH100 --ranks ²", "--ranks ² is not a number"),
    ],
)
def test_oversized_command_line_options_are_refused(
    words: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data = pack_small(tmp_path) if "{data}" in words else None
    capsys.readouterr()
    said = refusal(words.format(data=data).split(), monkeypatch, capsys)
    assert re.search(message, said), said
    assert len(said) < 2 * MAX_QUOTED_CHARS + 300
