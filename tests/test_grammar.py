"""The strategy language: what is read, its canonical form, and where a refusal points."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vitpar.errors import StrategyError
from vitpar.strategy import ROLES, Axis, Plan, Strategy, format_plan, parse
from vitpar.strategy.unbuilt import UNBUILT


@st.composite
def texts(draw: st.DrawFn) -> str:
    """Well-formed strategies in any spelling: degrees of 1, leading zeros, mixed case, blanks around."""
    roles = draw(st.permutations(ROLES))[: draw(st.integers(1, 4))]
    open_index = draw(st.integers(-1, 3))
    degree = st.integers(1, 64).flatmap(lambda n: st.sampled_from([f"{n}", f"0{n}"]))
    axes = [role if index == open_index else role + draw(degree) for index, role in enumerate(roles)]
    text = "x".join(axes) + draw(st.sampled_from(["", "+ckpt", "+ckpt.full"]))
    return draw(st.sampled_from([text, text.upper(), text.title(), f" {text}\n"]))


@given(texts())
def test_canonical_form_parses_back_to_the_same_plan(text: str) -> None:
    plan = parse(text)
    canonical = str(plan)
    assert parse(canonical) == plan
    assert str(parse(canonical)) == canonical == format_plan(plan) == canonical.lower()


@given(st.one_of(st.text(max_size=20), st.text("pdtfsx+.:@=-,*12 ckzero", max_size=20)))
def test_any_text_is_a_plan_or_a_refusal_in_one_line(text: str) -> None:
    try:
        plan = parse(text)
    except StrategyError as error:
        assert str(error) and "\n" not in str(error)
    else:
        assert parse(str(plan)) == plan


def test_fields() -> None:
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
    ],
)
def test_canonical_form(text: str, canonical: str) -> None:
    assert str(parse(text)) == canonical


READ_AS = "an axis is a role and a degree, as in dp2, and axes are joined by 'x'"
ONE_X = "one 'x' stands between two axes, as in dp2xtp2"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the strategy is empty: write roles and degrees, as in dp2xtp2"),
        (" \t", "the strategy is empty: write roles and degrees, as in dp2xtp2"),
        ("pp2xqp2", "unknown role 'qp' at position 5 of 'pp2xqp2': roles are pp, dp, fsdp, tp"),
        ("fsd4", "unknown role 'fsd' at position 1 of 'fsd4': roles are pp, dp, fsdp, tp (did you mean 'fsdp'?)"),
        ("PP2xDDP2", "unknown role 'ddp' at position 5 of 'PP2xDDP2': roles are pp, dp, fsdp, tp (did you mean 'dp'?)"),
        ("dp2xtp0", "the degree of 'tp' at position 5 of 'dp2xtp0' is 0: use 1 or more"),
        ("tp-2", "the degree of 'tp' at position 1 of 'tp-2' is -2: use 1 or more"),
        (
            "tpxdp",
            "both 'tp' and 'dp' at position 4 of 'tpxdp' have no degree: "
            "only one axis can take what is left of the ranks, give 'dp' a degree",
        ),
        ("tp2xtp3", "role 'tp' stands again at position 5 of 'tp2xtp3': give each role once, as in tp6"),
        ("tpxtp3", "role 'tp' stands again at position 4 of 'tpxtp3': give each role once"),
        ("dp1xdp1", "role 'dp' stands again at position 5 of 'dp1xdp1': give each role once, as in dp1"),
        ("x", f"stray 'x' at position 1 of 'x': {ONE_X}"),
        ("xdp2", f"stray 'x' at position 1 of 'xdp2': {ONE_X}"),
        ("dp2x", f"stray 'x' at position 4 of 'dp2x': {ONE_X}"),
        ("dp2xxtp2", f"stray 'x' at position 4 of 'dp2xxtp2': {ONE_X}"),
        ("dp2xtp2x+ckpt", f"stray 'x' at position 8 of 'dp2xtp2x+ckpt': {ONE_X}"),
        ("dp2 xtp2", "white space at position 4 of 'dp2 xtp2': write the strategy without it"),
        ("dp2xtp2+ ckpt", "white space at position 9 of 'dp2xtp2+ ckpt': write the strategy without it"),
        ("4xdp2", f"cannot read '4' at position 1 of '4xdp2': {READ_AS}"),
        ("tp2dp2", f"cannot read 'tp2dp2' at position 1 of 'tp2dp2': {READ_AS}"),
        ("dp2xtp2.5", f"cannot read 'tp2.5' at position 5 of 'dp2xtp2.5': {READ_AS}"),
        ("dp２", f"cannot read 'dp２' at position 1 of 'dp２': {READ_AS}"),
        ("dp" + "9" * 10, f"cannot read 'dp9999999999' at position 1 of 'dp9999999999': {READ_AS}"),
        ("dp2:tp2", f"cannot read 'dp2:tp2' at position 1 of 'dp2:tp2': {READ_AS}"),
        ("+ckpt", "no axis stands before the '+' at position 1 of '+ckpt': write one, as in dp1+ckpt"),
        ("dp2+", "empty flag at position 4 of 'dp2+': write a flag after the '+', as in +ckpt, or drop it"),
        ("dp2++ckpt", "empty flag at position 4 of 'dp2++ckpt': write a flag after the '+', as in +ckpt, or drop it"),
        ("dp2+ckpt+ckpt", "flag 'ckpt' stands again at position 10 of 'dp2+ckpt+ckpt': give each flag once"),
        ("dp2+ckpt.full+ckpt", "flag 'ckpt' stands again at position 15 of 'dp2+ckpt.full+ckpt': give each flag once"),
        ("dp2+ckp", "unknown flag 'ckp' at position 5 of 'dp2+ckp': flags are ckpt (did you mean 'ckpt'?)"),
        (
            "dp2+ckpt.ful",
            "unknown checkpoint policy 'ful' at position 5 of 'dp2+ckpt.ful': policies are full (did you mean 'full'?)",
        ),
        ("dp2+2.5d@", "unknown flag '2.5d@' at position 5 of 'dp2+2.5d@': flags are ckpt"),
        (
            "dp2+tp2",
            "unknown flag 'tp2' at position 5 of 'dp2+tp2': "
            "axes are joined by 'x' and stand before the flags, as in dp2xtp2+ckpt",
        ),
        ("dp2xckpt", "'ckpt' at position 5 of 'dp2xckpt' is a flag, not an axis: write +ckpt at the end"),
        ("dp2xzero1", "'zero1' at position 5 of 'dp2xzero1' is a flag, not an axis: write +zero1 at the end"),
    ],
)
def test_refusals_point_at_the_place(text: str, message: str) -> None:
    with pytest.raises(StrategyError) as caught:
        parse(text)
    assert str(caught.value) == message


@pytest.mark.parametrize("feature", [feature for feature in UNBUILT if feature.startswith("+")])
def test_flags_not_built_yet_are_refused_by_name(feature: str) -> None:
    with pytest.raises(StrategyError) as caught:
        parse(f"tp4xdp2{feature.upper()}")
    place = f"at position 9 of 'tp4xdp2{feature.upper()}'"
    assert str(caught.value) == f"vitpar does not run {feature} yet {place}: {UNBUILT[feature]}"


@pytest.mark.parametrize(
    ("text", "start"),
    [
        ("tp8+2.5d@2", "vitpar does not run +2.5d yet at position 5 of 'tp8+2.5d@2': "),
        ("dp8+ckpt+zero1", "vitpar does not run +zero1 yet at position 10 of 'dp8+ckpt+zero1': "),
        (
            "pp2: stem=fsdp4, 0-11=tp2xfsdp2, *=fsdp4+ckpt",
            "vitpar does not run layerwise plans yet at position 1 of 'pp2: stem=fsdp4, 0-11=tp2xfsdp2, ",
        ),
        ("PP1 : *=dp8", "vitpar does not run layerwise plans yet at position 1 of 'PP1 : *=dp8': "),
    ],
)
def test_more_that_is_not_built_yet(text: str, start: str) -> None:
    with pytest.raises(StrategyError) as caught:
        parse(text)
    assert str(caught.value).startswith(start)
