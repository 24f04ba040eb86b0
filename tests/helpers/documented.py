"""Code blocks of the documentation, and a shell that runs them: `vitpar` is forked from the server of commands."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from helpers import command_line
from helpers.command_server import Process
from helpers.paths import ROOT

PROGRAMS = "vitpar|python3?|pip|hf|make|pytest|torchrun|mpirun|srun|sbatch|accelerate|kubectl|sky|git|cd|mkdir|export"
"""Words that a block of commands begins with; other blocks without a language are output, syntax or a picture."""
MARK = "\x1e"
"""Printed before each command of a block."""
SHIM = """#!{python} -S
import os, signal, socket, sys
sys.path.insert(0, {helpers!r})
from command_server import READ_LATE, Process
Process.requests, Process.environment = socket.socket(fileno={server}), {environment!r}
late = {{name: value for name, value in os.environ.items() if READ_LATE.match(name)}}
words = [sys.executable, "-m", "vitpar_cli.main", *sys.argv[1:]]
vitpar = Process(words, env=Process.environment | late, start_new_session=True)
for number, its in ((signal.SIGINT, signal.SIGINT), (signal.SIGTERM, signal.SIGKILL)):
    signal.signal(number, lambda number, frame, its=its: os.killpg(vitpar.pid, its))
sys.exit(vitpar.wait())
"""
TORCHVISION = """import sys
sys.path.remove(__file__.rpartition("/")[0])
del sys.modules[__name__]
from helpers.torchvision_import import import_torchvision
import_torchvision()
"""


@dataclass(frozen=True)
class Block:
    """A code block of a page."""

    page: str
    line: int
    """Number of its first line."""
    language: str
    text: str
    shown: str
    """Output that the page shows after it."""

    @property
    def name(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def runs(self) -> bool:
        """Whether it has commands or Python."""
        words = self.language in ("sh", "bash", "console") or re.match(rf"({PROGRAMS})\b", self.text)
        return self.language == "python" or (self.language != "text" and bool(words))


def blocks(page: str) -> Iterator[Block]:
    """Yield the blocks of a page that can run, each with the output after it."""
    text = (ROOT / page).read_text()
    found = []
    for match in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.M | re.S):
        found.append(Block(page, text[: match.start(2)].count("\n") + 1, match[1], match[2], ""))
    for block, after in zip_longest(found, found[1:]):
        if block.runs:
            shown = after.text if after and after.language == "" and not after.runs else ""
            yield Block(block.page, block.line, block.language, block.text, shown)


def command_folder(folder: Path) -> Path:
    """Write a program `vitpar` that forks the server of commands, and return its folder."""
    if not command_line._servers:
        command_line._servers.append(command_line.server())
    assert Process.requests is not None
    values = {"python": sys.executable, "helpers": str(ROOT / "tests/helpers"), "server": Process.requests.fileno()}
    (folder / "vitpar").write_text(SHIM.format(environment=Process.environment, **values))
    (folder / "vitpar").chmod(0o755)
    # `import timm` of a page works even if torchvision does not match this build of torch.
    (folder / "torchvision.py").write_text(TORCHVISION)
    return folder


def run_block(
    text: str, place: Path, programs: Path, stops: dict[str, str], environment: dict[str, str], limit: float = 250
) -> tuple[int, str]:
    """Run the shell commands `text` until one fails. Return the exit code, and the output with a MARK at each command.

    stops: expressions of commands that end by Ctrl-C, each with the output that it is pressed after
    """
    assert Process.requests is not None
    script = f'trap \'printf "\\n{MARK}%s\\n" "$BASH_COMMAND"\' DEBUG\ntrap : INT\nset -eE\n{text}'
    paths = [str(programs), str(Path(sys.executable).parent), os.environ["PATH"]]
    environment = command_line.clean_environment() | {"PATH": os.pathsep.join(paths), "COLUMNS": "120"} | environment
    environment["PYTHONPATH"] = os.pathsep.join([str(programs), environment["PYTHONPATH"], str(ROOT / "tests")])
    shell = subprocess.Popen(
        ["bash", "-c", script],
        cwd=place,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        pass_fds=[Process.requests.fileno()],
        start_new_session=True,
    )
    assert shell.stdout is not None
    os.set_blocking(shell.stdout.fileno(), False)
    output, stopped, until = "", "", time.monotonic() + limit
    try:
        while shell.poll() is None and time.monotonic() < until:
            output += (shell.stdout.read() or b"").decode()
            command, _, printed = output.rpartition(MARK)[2].partition("\n")
            ready = any(re.search(words, command) and re.search(shown, printed) for words, shown in stops.items())
            if ready and command != stopped:
                os.killpg(shell.pid, signal.SIGINT)
                stopped = command
            time.sleep(0.05)
        output += (shell.stdout.read() or b"").decode()
    finally:
        with suppress(ProcessLookupError):
            os.killpg(shell.pid, signal.SIGTERM)
    return shell.wait(), output


def without_numbers(text: str) -> str:
    """Return a text in one line without its numbers, units and bars, which differ from run to run."""
    text = re.sub(r"[-+±≈]?\d[\d.,:e+-]*[kKMG]?( ?(ms|s|[KMGkT]?i?B|hours?|minutes?|days?)\b)?|\?", "#", text)
    return " ".join(re.sub(r"[█▁▂▃▄▅▆▇─━]+", "", text).split())


def missing(shown: str, output: str) -> list[str]:
    """Return the lines of the output `shown` on a page that `output` does not have in this order, but for numbers.

    … on a page stands for anything.
    """
    printed, at, lost = without_numbers(output), 0, []
    for line in shown.splitlines():
        parts = [re.escape(part.strip()) for part in without_numbers(line).split("…")]
        if found := re.search(" ?.*?".join(parts), printed[at:]):
            at += found.end()
        else:
            lost.append(line)
    return lost
