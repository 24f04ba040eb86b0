"""`vitpar board`: serve a table of runs that leads to their pages."""

from pathlib import Path

import typer

from vitpar.runs.pages.plotly import library
from vitpar_cli.outputs import origin, origin_words

PORT = 8123
"""Port by default, of live reports too."""


def board(
    folder: Path = typer.Argument(Path("runs"), metavar="[DIR]", help="Folder that holds runs."),
    port: int = typer.Option(PORT, "--port", min=0, max=65535, help="Port; 0 for any free one."),
) -> None:
    """Serve a page on 127.0.0.1 with all runs of a folder, which follows them while they train.

    Its table has state, data, model, plan, steps, loss, metric and speed of each run, and can be sorted. A run's name
    opens its page, marked runs are compared: charts, plans, differences of settings. Runs that differ in their seed
    alone are summed up.

    Example: vitpar board
    """
    serve_pages(folder, port)


def serve_pages(runs: Path | list[Path], port: int) -> None:
    """Serve the board of a folder, or the report of runs, until Ctrl-C."""
    from vitpar.runs.live import LiveReport

    library()  # refuses to work without it
    with LiveReport(runs, port, origin_words(origin())) as server:
        typer.echo(f"serving    {server.url}  (Ctrl-C ends it)")
        server.run()
