"""Lines of each part of the project: none grows beyond its row."""

from collections import Counter

from helpers.paths import ROOT

MOST = {
    "cli": 5_721,
    "experiments": 9_023,
    "src/vitpar": 1_589,
    "src/vitpar/bench": 601,
    "src/vitpar/check": 1_107,
    "src/vitpar/checkpoint": 945,
    "src/vitpar/data": 7_149,
    "src/vitpar/kernels": 398,
    "src/vitpar/launch": 1_421,
    "src/vitpar/models": 7_985,
    "src/vitpar/parallel": 2_961,
    "src/vitpar/planner": 9_871,
    "src/vitpar/recipe": 2_846,
    "src/vitpar/runs": 2_840,
    "src/vitpar/strategy": 2_704,
    "src/vitpar/tasks": 2_902,
    "src/vitpar/training": 6_185,
    "src/vitpar/weights": 1_968,
    "tests": 37_361,
}
"""Most lines of each part: a package, the files directly in `src/vitpar`, or another folder.

Who makes a part smaller lowers its row. Who raises a row lowers another one by as much in the same commit.
"""
KINDS = (".py", ".js", ".css", ".html")


def lines_of_parts() -> Counter[str]:
    """Return the physical lines of each part."""
    lines = Counter[str]()
    for top in ("cli", "experiments", "src", "tests"):
        for path in (ROOT / top).rglob("*.*"):
            if path.suffix in KINDS and "results" not in path.parts:
                folders = path.relative_to(ROOT).parts[:-1]
                lines["/".join(folders[:3]) if top == "src" else top] += len(path.read_text().splitlines())
    return lines


def test_no_part_is_larger_than_its_row() -> None:
    over = [
        f"{part} is over its row in tests/test_size.py: remove {number - MOST.get(part, 0):,} of its lines, or lower "
        "another row by as many and raise this one"
        for part, number in lines_of_parts().items()
        if number > MOST.get(part, 0)
    ]
    assert not over, "\n".join(over)
