"""Self-contained HTML page: style, switches, tables. It loads nothing from the network.

Texts from files are escaped by whoever makes the HTML. A content security policy backs that up: the browser runs only
scripts whose hash the page names, and loads nothing but embedded images.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from html import escape

STYLE = """
:root { color-scheme: light dark; --faint: #8883; --page: light-dark(#fff, #121416);
  --accent: light-dark(#14507f, #8cc8f5); }
:root:has(#theme-light:checked) { color-scheme: light; } :root:has(#theme-dark:checked) { color-scheme: dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1120px; margin: 1.5rem auto; padding: 0 1rem;
  background: var(--page); }
h1 { font-size: 1.35rem; line-height: 1.3; overflow-wrap: anywhere; } h2 { font-size: 1.1rem; margin-top: 2.2rem; }
h3 { font-size: 1rem; margin: 1.2rem 0 .4rem; overflow-wrap: anywhere; }
a { color: var(--accent); } code { font-size: .95em; overflow-wrap: anywhere; } h1 small { font-weight: normal; }
.scroll { overflow-x: auto; }
.chart { margin: 0 0 .8rem; min-width: 0; } .chart figcaption { font-weight: 600; font-size: 14px; }
.chart .note { margin: 0; } .chart details { margin: 0 0 .4rem; font-size: 13px; }
.chart summary { opacity: .8; } .chart table { font-size: 12px; }
table { border-collapse: collapse; width: 100%; font-size: 14px; }
th, td { text-align: left; padding: .25rem .6rem .25rem 0; border-bottom: 1px solid var(--faint); }
td.n, th.n { text-align: right; padding-right: .9rem; white-space: nowrap; font-variant-numeric: tabular-nums; }
.facts td { min-width: 0; overflow-wrap: anywhere; }
.facts td:first-child { white-space: nowrap; opacity: .75; vertical-align: top; }
.ranks { width: auto; } .ranks td { text-align: center; padding: .25rem .6rem; border: 1px solid var(--faint); }
.ranks small { white-space: nowrap; } .ranks th { border: 0; white-space: nowrap; }
td:has(code), .scroll > table:not([class]) td:last-child:not(.n) { min-width: 13rem; }
pre { background: var(--faint); padding: .6rem; white-space: pre-wrap; overflow-wrap: anywhere; border-radius: 4px; }
details { margin: .6rem 0; } summary { cursor: pointer; } .note { opacity: .8; font-size: 13px; }
.switch { display: inline-flex; align-items: center; gap: .1rem; font-size: 13px; border: 0; margin: 0; padding: 0; }
.switch legend { float: left; padding: 0 .35rem 0 0; opacity: .8; }
.switch label { padding: .1rem .5rem; border-radius: 4px; cursor: pointer; }
.switch input { position: absolute; opacity: 0; width: 1px; height: 1px; }
.switch label:has(:checked) { background: var(--faint); font-weight: 600; }
.switch label:has(:focus-visible) { outline: 2px solid var(--accent); }
.controls { position: sticky; top: 0; z-index: 10; background: var(--page); padding: .3rem 0; display: flex;
  flex-wrap: wrap; gap: .2rem 1.4rem; align-items: center; }
.toggles { flex-wrap: wrap; }
.toggles label { max-width: 18rem; overflow: hidden; text-overflow: ellipsis; white-space: nowrap; }
.toggles label:has(input:not(:checked)) { background: none; opacity: .5; text-decoration: line-through; }
.mark { margin-right: .35em; } .chart .switch { font-size: 12px; margin-left: -.5rem; }
.chart .toggles label { max-width: min(100%, 28rem); }
.chart .switch legend { display: none; }
@media (max-width: 520px) { body { padding: 0 .75rem; } .controls { position: static; } }
.theme { float: right; margin: 0 0 .4rem 1rem; }
@media (max-width: 520px) { .theme { float: none; margin: 0; } td:has(code) { min-width: 8rem; } }
@media print { .switch { display: none; } }
"""
"""Style of all pages."""


def policy(scripts: Sequence[str], live: bool) -> str:
    """Return the content security policy of a page that runs exactly these scripts.

    live: whether the page asks its server for news, and leads to its other pages.
    """
    digests = (hashlib.sha256(script.encode()).digest() for script in scripts)
    hashes = " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)
    source = "'self'" if live else "'none'"
    return (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src {hashes}; img-src data: blob:; "
        f"connect-src {source}; base-uri 'none'; form-action {source}"
    )


def document(title: str, body: str, style: str, script: str, library: str, version: str = "") -> str:
    """Return a complete HTML page.

    style: rules in addition to `STYLE`.
    script: script that runs after the body.
    library: script that it may add to the page.
    version: state of what a live page shows; empty for a page in a file.
    """
    head = (
        '<meta charset="utf-8"><meta http-equiv="Content-Security-Policy" '
        f'content="{escape(policy([script, library], bool(version)))}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}{style}</style>"
    )
    live = f' data-version="{escape(version)}"' if version else ""
    theme = switch("theme", "theme", {"auto": "auto", "light": "light", "dark": "dark"})
    body = f'<div class="theme">{theme}</div>{body}<script>{script}</script>'
    page = f'<!doctype html><html lang="en"{live}><head>{head}</head><body>{body}</body></html>\n'
    return page.encode(errors="replace").decode()  # names of files need not be UTF-8


def switch(name: str, words: str, choices: Mapping[str, str], chosen: str | None = None) -> str:
    """Return a group of buttons of which one is pressed.

    name: the button of choice `key` has the id `name-key`, for rules of style such as `:has(#name-key:checked)`.
    words: name of the group for readers.
    choices: text of each button by its key.
    chosen: key of the button that is pressed at first; None for the first one.
    """
    first = next(iter(choices)) if chosen is None else chosen
    buttons = "".join(
        f'<label><input type="radio" name="{name}" id="{name}-{key}"{" checked" * (key == first)}>'
        f"{escape(text)}</label>"
        for key, text in choices.items()
    )
    return f'<fieldset class="switch"><legend>{escape(words)}</legend>{buttons}</fieldset>'


def toggles(choices: Mapping[str, str]) -> str:
    """Return a group of buttons, each of which shows or hides something. choices: HTML of each button by its id."""
    buttons = (f'<label><input type="checkbox" id="{name}" checked>{words}</label>' for name, words in choices.items())
    return f'<fieldset class="switch toggles"><legend>show</legend>{"".join(buttons)}</fieldset>'


def facts(rows: Mapping[str, str]) -> str:
    """Return a table with a row for each name and its HTML."""
    cells = "".join(f"<tr><td>{escape(name)}</td><td>{words}</td></tr>" for name, words in rows.items())
    return f'<table class="facts">{cells}</table>'


def table(headings: Sequence[str], rows: Iterable[Sequence[str]], numbers: slice = slice(0)) -> str:
    """Return a table of HTML cells. numbers: columns that are right-aligned; none by default."""
    right = range(len(headings))[numbers]

    def row(tag: str, cells: Sequence[str]) -> str:
        opened = (f'{tag} class="n"' if index in right else tag for index in range(len(cells)))
        return f"<tr>{''.join(f'<{t}>{cell}</{tag}>' for t, cell in zip(opened, cells, strict=True))}</tr>"

    body = "".join(row("td", cells) for cells in rows)
    return f'<div class="scroll"><table>{row("th", headings)}{body}</table></div>'
