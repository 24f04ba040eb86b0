"""Strategies and plans from untrusted sources: absurd values are refused quickly, with a short error."""

from collections.abc import Callable
from typing import Any

import pytest

from vitpar.errors import StrategyError
from vitpar.limits import MAX_QUOTED_CHARS
from vitpar.strategy import parse

pytestmark = pytest.mark.timeout(20)


def refused(make: Callable[[], Any], message: str) -> str:
    with pytest.raises(StrategyError, match=message) as caught:
        make()
    said = str(caught.value)
    assert len(said) < 3 * MAX_QUOTED_CHARS + 400 and "\n" not in said
    return said


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
    refused(lambda: parse(text), message)


@pytest.mark.parametrize("before", [0, 3, 99, 100, 101, 5_000])
def test_long_strategy_is_quoted_around_the_mistake(before: int) -> None:
    groups = "".join(f"{index}=dp2," for index in range(before % 1024))
    said = refused(lambda: parse(f"pp1: {groups}head=dp2xwrong4,{'*=dp2,' * 5_000}"), "unknown role 'wrong'")
    place = len(f"pp1: {groups}head=dp2x")
    assert f"at position {place + 1} of '" in said
    quote = said.partition(" of '")[2].partition("'")[0]
    assert len(quote) <= MAX_QUOTED_CHARS and "head=dp2xwrong4" in quote
    assert quote.startswith("…") == (place > 99) and quote.endswith("…")
