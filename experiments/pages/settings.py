"""The settings of recipes: type, default and effect of each."""

from vitpar.recipe.reference import about, settings

INTRODUCTION = """\
A recipe is a TOML file with these sections. `vitpar train --set SECTION.KEY=VALUE` sets one of them, and so do the
options of the same meaning. Settings that would change nothing are refused. `vitpar settings` prints this page,
`vitpar settings KEY` one entry. An interval is a number of steps, a share of the run below 1, or
text such as `"5 epochs"`, `"1e6 samples"` or `"10 %"`. Without a recipe file the defaults also depend on the data
([defaults.md](defaults.md)). Written by `make docs` from the sections' fields (`src/vitpar/recipe/sections`).
"""


def page() -> str:
    """Return the page."""
    lines, section = ["# Settings", "", *INTRODUCTION.splitlines()], ""
    for one in settings():
        name = one.key.partition(".")[0]
        if name != section:
            section = name
            lines += ["", f"## {name}", "", about(name), "", "| key | type | default | effect |", "|---|---|---|---|"]
        kind = one.kind.replace("|", "\\|")
        lines.append(f"| `{one.key}` | {kind} | `{one.default}` | {one.effect} |")
    return "\n".join(lines) + "\n"
