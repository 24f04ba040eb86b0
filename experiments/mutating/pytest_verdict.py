"""Pytest plugin that writes the outcome of each test as a line of JSON to the file named by the variable VERDICTS.

kind: `failed` if an assertion failed, `crash` for any other error, or `passed`. Errors of ranks reach the test process
as text; then the last traceback in the text decides.
"""

from __future__ import annotations

import json
import os
import re
from contextlib import suppress

import pytest

VERDICTS = "VITPAR_MUTATION_VERDICTS"


def pytest_configure() -> None:
    """Make Hypothesis report the first counterexample: searching for a shorter one can take minutes."""
    with suppress(ImportError):
        from hypothesis import Phase, settings

        settings.register_profile("mutations", phases=(Phase.explicit, Phase.generate))
        settings.load_profile("mutations")


def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> None:
    """Write a line for an error in any phase of a test, and for each test that passed."""
    if call.excinfo is None:
        kind, words = "passed", ""
        if call.when != "call":
            return
    elif call.excinfo.errisinstance(pytest.skip.Exception):
        return
    else:
        kind, words = judge(call.excinfo.value)
    with open(os.environ[VERDICTS], "a") as file:
        print(json.dumps({"kind": kind, "test": item.name, "words": words}), file=file)


def judge(error: BaseException) -> tuple[str, str]:
    """Return kind and message of the error that a test raised."""
    words = f"{type(error).__name__}: {error}"
    if "Traceback (most recent call last):" in str(error):
        after = re.split(r"^Traceback \(most recent call last\):$", str(error), flags=re.MULTILINE)[-1]
        words = next((line for line in after.splitlines() if line and not line.startswith(" ")), words)
        asserted = re.match(r"(\w+\.)*(AssertionError|Failed)\b", words) is not None
    else:
        asserted = isinstance(error, AssertionError | pytest.fail.Exception)
    return "failed" if asserted else "crash", words.splitlines()[0][:300]
