"""Input limits: their table, the readers that enforce them, and messages that quote untrusted text."""

import json
import os
from pathlib import Path

import pytest

from vitpar import io, limits
from vitpar.errors import DataError, UserError
from vitpar.text import nearest, shown


def test_untrusted_text_is_truncated_and_escaped() -> None:
    assert len(shown("x" * 1_000_000)) == limits.MAX_QUOTED_CHARS - 1
    assert shown("short") == "short"
    said = str(DataError("sample '\x1b[31m\udcff\tü…\n' is bad"))
    assert said == "sample '\\x1b[31m\\udcff\\tü…\n' is bad" and said.encode()
    assert str(UserError()) == "" and nearest("x" * 10_000, ["y"]) == ""


def test_only_regular_files_of_bounded_size_are_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"12345")
    assert io.read_bytes(tmp_path / "file", 5) == b"12345"
    with pytest.raises(OSError, match="it has more than 4 bytes"):
        io.read_bytes(tmp_path / "file", 4)
    os.mkfifo(tmp_path / "pipe")
    for place in (tmp_path, tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(OSError, match=r"it is (a folder|not a regular file)"):
            io.open_regular(place)
    with pytest.raises(ValueError, match="nested too deeply"):
        io.parse_json("[" * 1_000_000)


@pytest.mark.parametrize("text", [r'"\ud83d\ude00"', r'"\\ud800"', r'"a\\\\ud800 \uD83D\uDe00"', '"\\ud7ff"'])
def test_json_with_paired_surrogates_is_read(text: str) -> None:
    assert io.parse_json(text) == json.loads(text) == io.parse_json(text.encode())


@pytest.mark.parametrize("text", [r'"\ud800"', r'{"\uDfff": 1}', r'"\ud83dx\ude00"', r'"\\\ud83d\ud83d"', '"\ud800"'])
def test_json_with_lone_surrogates_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"surrogate|is not UTF-8"):
        io.parse_json(text.encode("utf-8", "surrogatepass"))
