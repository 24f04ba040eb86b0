"""Strategy grammar: accepted texts, their canonical form, and the position in error messages."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.sentences import says
from vitpar.errors import StrategyError
from vitpar.limits import MAX_QUOTED_CHARS
from vitpar.strategy import ROLES, Axis, Plan, Strategy, parse


@st.composite
def texts(draw: st.DrawFn) -> str:
    """Draw well-formed strategies in any spelling: degrees of 1, leading zeros, mixed case, surrounding blanks."""
    roles = draw(st.permutations(ROLES))[: draw(st.integers(1, 4))]
    open_index = draw(st.integers(-1, 3))
    degree = st.integers(1, 16).flatmap(lambda n: st.sampled_from([f"{n}", f"0{n}"]))
    axes = [role if index == open_index else role + draw(degree) for index, role in enumerate(roles)]
    text = "x".join(axes) + draw(st.sampled_from(["", "+ckpt", "+ckpt.full", "+ckpt.selective", "+offload+ckpt"]))
    return draw(st.sampled_from([text, text.upper(), text.title(), f" {text}\n"]))


@given(texts())
def test_canonical_form_parses_back_to_the_same_plan(text: str) -> None:
    plan = parse(text)
    canonical = str(plan)
    assert parse(canonical) == plan
    assert str(parse(canonical)) == canonical == str(plan) == canonical.lower()


@st.composite
def layered_texts(draw: st.DrawFn) -> str:
    """Draw well-formed layerwise plans of 12 ranks per stage, with blanks around their signs."""
    choices = ["dp12", "fsdp12+ckpt", "tp4xdp3+sp", "TP4xfsdp3+2d", "dp2xfsdp3xtp2", "tp8+3D", "fsdp", "dp3xtp+zero2"]
    strategy = st.sampled_from([c for c in choices if "tp8" not in c])
    bounds = sorted(draw(st.sets(st.integers(0, 30), max_size=5)))
    selectors = [f"{a}-{b - 1}" if draw(st.booleans()) else str(a) for a, b in pairwise(bounds)]
    selectors = draw(st.permutations([*selectors, *draw(st.sets(st.sampled_from(["embed", "head"]))), "*"]))
    blank = st.sampled_from(["", " "])
    groups = [f"{draw(blank)}{name}{draw(blank)}={draw(blank)}{draw(strategy)}{draw(blank)}" for name in selectors]
    return f"pp{draw(st.integers(1, 9))}{draw(blank)}:{','.join(groups)}"


@given(layered_texts())
def test_layerwise_plans_have_a_canonical_form(text: str) -> None:
    plan = parse(text)
    assert parse(str(plan)) == plan
    assert parse(str(plan).upper()) == plan
    resolved = plan.resolve(12 * (plan.pp or 1))
    assert resolved.stage_size == 12 and parse(str(resolved)) == resolved


def test_parsed_fields() -> None:
    assert parse("tp2xpp4xdp+ckpt") == Plan(
        layers=(("*", Strategy((Axis("tp", 2), Axis("dp", None)), checkpoint="full")),), pp=4, pp_index=1
    )


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("pp2xtp2xdp2", "pp2xtp2xdp2"),
        ("DP2xFsdp4", "dp2xfsdp4"),
        ("tp2xdp", "tp2xdp"),
        ("ppxdp2", "ppxdp2"),
        ("dp1", "dp1"),
        ("tp1xpp1xfsdp1", "dp1"),
        ("tp1+ckpt", "dp1+ckpt"),
        ("dp1xtp2xpp2", "tp2xpp2"),
        ("dp02", "dp2"),
        ("dp2+ckpt.full", "dp2+ckpt"),
        (" dp2 ", "dp2"),
        ("dp8+offload+ckpt+zero1", "dp8+zero1+ckpt+offload"),
        ("tp4xdp2+ckpt.selective+2D", "tp4xdp2+2d+ckpt.selective"),
        ("tp8+2.5d@2", "tp8+2.5d@2"),
        ("tp8+2.5d", "tp8+2.5d"),
        ("tp2+sp+ckpt", "tp2+sp+ckpt"),
        ("PP2 : EMBED = fsdp4 ,0-11=tp2xfsdp2, * = fsdp4+ckpt", "pp2: embed=fsdp4, 0-11=tp2xfsdp2, *=fsdp4+ckpt"),
        ("pp1: 20-31=fsdp8, 0-19=dp8", "pp1: 0-19=dp8, 20-31=fsdp8"),
        ("pp1: 2-3=dp2, 4=dp2, 0-1=dp2", "pp1: 0-4=dp2"),
        ("pp2: 0-3=dp4, *=dp4", "pp2xdp4"),
        ("pp1: head=dp1, *=dp1", "dp1"),
        ("pp: 3=dp4, *=fsdp4", "pp: 3=dp4, *=fsdp4"),
    ],
)
def test_canonical_form(text: str, canonical: str) -> None:
    assert str(parse(text)) == canonical


FLAGS = "sp, 2d, 2.5d, 3d, zero1, zero2, ckpt, ckpt.full, ckpt.selective, offload"
REPEATS = "repeats a flag, or contradicts one"
READ_AS = "an axis is a role and a degree, as in dp2, and axes are joined by 'x'"
ONE_X = "write one 'x' between two axes, as in dp2xtp2"
ALIKE = "give all layers strategies of the same size"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the strategy is empty: write roles and degrees, as in dp2xtp2"),
        (" \t", "the strategy is empty: write roles and degrees, as in dp2xtp2"),
        ("pp2xqp2", "unknown role 'qp' at position 5 of 'pp2xqp2': roles are pp, dp, fsdp, tp"),
        ("fsd4", "unknown role 'fsd' at position 1 of 'fsd4': roles are pp, dp, fsdp, tp (did you mean 'fsdp'?)"),
        ("PP2xDDP2", "unknown role 'ddp' at position 5 of 'PP2xDDP2': roles are pp, dp, fsdp, tp (did you mean 'dp'?)"),
        ("dp2xtp0", "the degree of 'tp' is 0 at position 5 of 'dp2xtp0': use 1 to 65,536"),
        ("tp-2", "the degree of 'tp' is -2 at position 1 of 'tp-2': use 1 to 65,536"),
        ("tpxdp", "'dp' is the second axis without a degree at position 4 of 'tpxdp': give one of them a number"),
        ("tp2xtp3", "role 'tp' is repeated at position 5 of 'tp2xtp3': give each role once"),
        ("tpxtp3", "role 'tp' is repeated at position 4 of 'tpxtp3': give each role once"),
        ("dp1xdp1", "role 'dp' is repeated at position 5 of 'dp1xdp1': give each role once"),
        ("x", f"stray 'x' at position 1 of 'x': {ONE_X}"),
        ("xdp2", f"stray 'x' at position 1 of 'xdp2': {ONE_X}"),
        ("dp2x", f"stray 'x' at position 4 of 'dp2x': {ONE_X}"),
        ("dp2xxtp2", f"stray 'x' at position 4 of 'dp2xxtp2': {ONE_X}"),
        ("dp2xtp2x+ckpt", f"stray 'x' at position 8 of 'dp2xtp2x+ckpt': {ONE_X}"),
        ("dp2 xtp2", "whitespace at position 4 of 'dp2 xtp2': remove it"),
        ("dp2xtp2+ ckpt", "whitespace at position 9 of 'dp2xtp2+ ckpt': remove it"),
        ("4xdp2", f"cannot read '4' at position 1 of '4xdp2': {READ_AS}"),
        ("tp2dp2", f"cannot read 'tp2dp2' at position 1 of 'tp2dp2': {READ_AS}"),
        ("dp2xtp2.5", f"cannot read 'tp2.5' at position 5 of 'dp2xtp2.5': {READ_AS}"),
        ("dp２", f"cannot read 'dp２' at position 1 of 'dp２': {READ_AS}"),
        ("dp" + "9" * 10, f"cannot read 'dp9999999999' at position 1 of 'dp9999999999': {READ_AS}"),
        ("dp2:tp2", f"cannot read 'dp2:tp2' at position 1 of 'dp2:tp2': {READ_AS}"),
        ("+ckpt", "no axis before the '+' at position 1 of '+ckpt': write one, as in dp1+ckpt"),
        ("dp2+", "empty flag at position 4 of 'dp2+': write a flag after the '+', as in +ckpt, or drop it"),
        ("dp2++ckpt", "empty flag at position 4 of 'dp2++ckpt': write a flag after the '+', as in +ckpt, or drop it"),
        ("dp2+ckpt+ckpt", f"+ckpt {REPEATS} at position 10 of 'dp2+ckpt+ckpt': give one of them"),
        ("dp2+ckpt.full+ckpt", f"+ckpt {REPEATS} at position 15 of 'dp2+ckpt.full+ckpt': give one of them"),
        ("dp2+ckp", "unknown flag 'ckp' at position 5 of 'dp2+ckp': flags are " + FLAGS + " (did you mean 'ckpt'?)"),
        ("dp2+ckpt.ful", f"unknown flag 'ckpt.ful' at…: flags are {FLAGS} (did you mean 'ckpt.full'?)"),
        ("dp2+zero1+zero2", f"+zero2 {REPEATS} at position 11 of 'dp2+zero1+zero2': give one of them"),
        ("tp4+2d+3d", f"+3d {REPEATS} at position 8 of 'tp4+2d+3d': give one of them"),
        (
            "dp2+2.5d@",
            "unknown flag '2.5d@' at position 5 of 'dp2+2.5d@': flags are " + FLAGS + " (did you mean '2.5d'?)",
        ),
        ("dp2+tp2", "unknown flag 'tp2' at…: axes are joined by 'x' and come before the flags, as in dp2xtp2+ckpt"),
        ("dp2xckpt", "'ckpt' is a flag, not an axis at position 5 of 'dp2xckpt': write +ckpt at the end"),
        ("pp2:", "empty group at position 5 of 'pp2:': a group is layers=strategy, as in 0-11=dp2"),
        ("pp2: dp2", "cannot read 'dp2' at position 6 of 'pp2: dp2': a group is layers=strategy, as in 0-11=dp2"),
        ("pp2: blk_=dp2, 1_=dp2", "'1_' is not a layer selector at position 16 of…: use embed, head, a block as in…"),
        ("pp2: 5-3=dp2", "blocks '5-3' run backwards at position 6 of 'pp2: 5-3=dp2': write 3-5"),
        ("pp2: *=dp2x", "stray 'x' at position 11 of 'pp2: *=dp2x': write one 'x' between two axes, as in dp2xtp2"),
        ("pp2: *=pp2xdp2", "pp is inside a group at position 6 of…: write pp once for all layers, before the ':'"),
        ("pp1: 0-3=dp2, 3-5=fsdp2", "block 3 is in two groups: give it one strategy"),
        ("pp1: embed=dp2, embed=dp2, *=dp2", "'embed' is in two groups: give it one strategy"),
        ("pp1: embed=dp2", "no block has a strategy (layers named: embed): add a group such as *=dp2"),
        ("pp2: 0-3=dp4, *=dp2", f"'0-3=dp4' takes 4 ranks of a stage but '*=dp2' takes 2: {ALIKE}"),
        ("pp: 0-3=dp, *=dp2", "both pp and a degree of a layer are open: give one of them a number"),
        ("pp0: *=dp2", "the degree of 'pp' is 0 at position 1 of 'pp0: *=dp2': use 1 to 65,536"),
    ],
)
def test_refusals_point_at_the_position(text: str, message: str) -> None:
    with says(message):
        parse(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dp2+sp", "+sp splits over tp, which 'dp2+sp' lacks: add an axis such as tp4"),
        ("tp1xdp2+2d", "+2d splits over tp, which 'dp2+2d' lacks: add an axis such as tp4"),
        ("tp4+2d+sp", "+sp clashes with +2d in 'tp4+2d': leave out +sp, 2d splits activations everywhere already"),
        ("tp6+2d", "+2d needs tp to be a square, not 6: use tp4 or tp9"),
        ("tp2+3d", "+3d needs tp to be a cube, not 2: use tp8 or tp27"),
        ("tp16+2.5d@3", "+2.5d@3 needs tp to be 3 times a square, not 16: use a depth of 1 or 4"),
        ("tp4+2.5d@2", "+2.5d@2 needs tp to be 2 times a square, not 4: use a depth of 1"),
        ("tp+2.5d@0", "+2.5d@0 has no depth: use 1 or more"),
        ("tp6+2.5d", "+2.5d needs tp to be a depth times a square, not 6: use tp8 or tp4"),
        ("fsdp2+zero1", "+zero1 shards over dp, which 'fsdp2+zero1' lacks: add an axis such as dp2"),
        ("dp2xfsdp2+zero2", "+zero2 clashes with fsdp in…: leave out +zero2, fsdp shards more already"),
    ],
)
def test_flags_that_clash_with_the_axes_are_refused(text: str, message: str) -> None:
    with says(message):
        parse(text)
    open_degree = text.replace("tp4", "tp").replace("tp6", "tp").replace("tp16", "tp").replace("tp2", "tp")
    if open_degree != text and "+sp" not in text:
        parse(open_degree)  # accepted while the degree is open; refused once it is known


# from untrusted sources


def refusal(text: str, message: str) -> str:
    """Return the refusal of an absurd text, which comes quickly and is short."""
    with pytest.raises(StrategyError, match=message) as caught:
        parse(text)
    said = str(caught.value)
    assert len(said) < 3 * MAX_QUOTED_CHARS + 400 and "\n" not in said
    return said


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dp999999999", "the degree of 'dp' is 999999999 at position 1 of .*: use 1 to 65,536"),
        ("dp2xtp65537", "the degree of 'tp' is 65537 at position 5 of .*: use 1 to 65,536"),
        ("pp999999999: *=dp2", "the degree of 'pp' is 999999999 at position 1"),
        ("dp60000xtp60000", "dp60000xtp60000 takes 3,600,000,000 ranks: use at most 65,536"),
        ("pp1: 0-999999999=dp2", "'0-999999999' names block 999999999 .*: models have at most 1,024 blocks"),
        ("pp1: 1024=dp2", "'1024' names block 1024 .*: models have at most 1,024 blocks"),
        ("q" * 60_000, "unknown role 'q{198}…' at position 1 of 'q{198}…'"),
        ("dp2\0" * 10_000, "is not a line of text"),
    ],
)
def test_oversized_strategy_strings_are_refused(text: str, message: str) -> None:
    refusal(text, message)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("before", [0, 3, 99, 100, 101, 5_000])
def test_long_strategy_is_quoted_around_the_mistake(before: int) -> None:
    groups = "".join(f"{index}=dp2," for index in range(before % 1024))
    said = refusal(f"pp1: {groups}head=dp2xwrong4,{'*=dp2,' * 5_000}", "unknown role 'wrong'")
    place = len(f"pp1: {groups}head=dp2x")
    assert f"at position {place + 1} of '" in said
    quote = said.partition(" of '")[2].partition("'")[0]
    assert len(quote) <= MAX_QUOTED_CHARS and "head=dp2xwrong4" in quote
    assert quote.startswith("…") == (place > 99) and quote.endswith("…")
