"""Sentences of errors, of which a test may leave out words."""

import re
from typing import Any

import pytest

from vitpar.errors import StrategyError


def says(sentence: str, error: type[Exception] = StrategyError) -> Any:
    """Return a context whose block must raise an error that says exactly `sentence`, where … stands for any words."""
    return pytest.raises(error, match=rf"^{'.*'.join(map(re.escape, sentence.split('…')))}\Z")
