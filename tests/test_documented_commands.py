"""Commands and Python in README and docs run as they stand, page by page; all options of commands exist."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from typer.exceptions import TyperException

from helpers.documented import MARK, Block, blocks, command_folder, missing, run_block
from helpers.given_files import hub, prepare
from helpers.paths import ROOT
from vitpar_cli.main import app

PAGES = ("README.md", *(str(path.relative_to(ROOT)) for path in sorted((ROOT / "docs").rglob("*.md"))))
GENERATED = ("docs/commands.md",)
"""Pages that print `--help` itself."""
ELSEWHERE = ("docs/api/vitpar.md",)
"""Pages whose blocks are one program: tests/test_examples.py runs it."""
MOST_CHANGED = 30
"""Blocks that may be left out or run with other words than on the page."""

LAUNCHER = "needs several machines, or packages that are not installed: tests/clusters and tests/engines run it"
SKIPPED = {
    r"^(pip|make|source|hf)\b|gpu_(programme|refit)": "installs, downloads or builds: make, CI or tests/experiments do",
    r"^py-spy": "is not installed: make bench-data runs it where it is",
    r"^(mpirun|srun|accelerate)\b|torchrun --nnodes|examples/engines": LAUNCHER,
    r"^vitpar (profile hardware *$|train --mesh \w+.json .*(vit_huge|bert_large)|bench .*--compile)": "needs GPUs",
    r"^vitpar (profile model|search) --model vit_huge_patch16_224(?!.*--cluster)": "needs profiles of GPUs",
    r"s3://": "needs object storage: tests/engines/test_object_store.py copies and trains",
}
"""Lines that are left out, and why."""
LONG = "would train for minutes to weeks on CPUs"
FEWER = "fewer steps print the same lines"
SMALL = "--model vit_nano_patch16_224 --batch-size 16 --steps 1 --precision fp32 --device cpu"
MAE = (
    "--model mae_custom --set model.image_size=8 --set model.patch_size=4 --set model.embed_dim=24 --set model.depth=2 "
)
MAE += "--set model.num_heads=4 --set model.options.decoder_embed_dim=16 --set model.options.decoder_depth=1"
BERT = "--model bert_custom --set model.embed_dim=16 --set model.depth=2 --set model.num_heads=2 "
BERT += "--set model.mlp_hidden_dim=32"
CHANGED = [
    (
        "README",
        r"--mesh auto --memory \S+",
        "--mesh dp2 --dry-run",
        "would measure for minutes: test_auto_mesh.py does",
    ),
    ("README", r"--task mae (--data .*)", rf"--task mae {MAE} --batch-size 8 \1", LONG),
    ("models", r"--model bert_base (--data .*)", rf"{BERT} --steps 2 --batch-size 8 \1", LONG),
    ("models", r"--model mae_vit_base (--data .*)", rf"{MAE} --steps 2 --batch-size 8 \1", LONG),
    ("models", r"^(vitpar train --weights runs/mae/weights [^#\n]*)", r"\1 --steps 2 ", LONG),
    (
        ".",
        r"^(vitpar train (?!.*--dry-run).*--model (?:vit_(?:base|huge)|mae_vit|(?:bert|t5)_(?!custom))[^#\n]*)",
        r"\1 --dry-run ",
        LONG,
    ),
    (".", r"^(vitpar train --recipe deit_small [^#\n]*)", r"\1 --batch-size 64 --dry-run ", LONG),
    (
        "README|index",
        r"^(vitpar train (?!.*--(?:steps|epochs|dry-run))[^#\n]*)",
        r"\1 --steps 2 --batch-size 16 ",
        LONG,
    ),
    (
        "choose-a-plan",
        r"^vitpar profile hardware.*\n",
        "",
        "docs/planning.md measures: a file is given",
    ),
    (".", r"^(vitpar profile .*--seconds) 0.0\d", r"\1 0.001", "would measure for minutes"),
    (".", r"^(vitpar validate .*--seconds) 0.5", r"\1 0.05", "would measure for minutes"),
    (
        "speed",
        r"^(vitpar bench --(?:mesh|recipe)[^#\n]*)",
        r"\1 --steps 2 --repeats 1 --warmup 1 ",
        "takes a minute a line",
    ),
    ("fine-tune", r"--steps 450", "--steps 6", LONG),
    ("fine-tune", r"--steps (\d)\d\d", r"--steps \1", LONG),
    ("tutorials/colossal-ai", r"^(vitpar train .*--weights weights/vit (?!.*--model)[^#\n]*)", rf"\1 {SMALL} ", LONG),
    ("tutorials/colossal-ai", r"^(vitpar train --recipe cifar10.*)", rf"\1 {SMALL} ", LONG),
    ("tutorials/train-on", r"--run-dir runs/first$", "--run-dir runs/first --steps 20 --set train.eval_every=5", FEWER),
    ("tutorials/move", r"(--run-dir runs/(?:moving|elastic).*)", r"\1 --steps 60 --set train.eval_every=10", FEWER),
]
"""Pages, words of a line, what runs in their place, and why."""
STOPS = {
    r"--live|^vitpar board": r"http://",
    r"train .*--run-dir runs/moving": r"(?m)^step 20 ",
    r"^torchrun .*--run-dir runs/elastic": r"(?m)^step 20 ",
}
"""Commands that end by Ctrl-C, and the output after which it is pressed."""
CODES = {
    r"--run-dir runs/moving": 75,
    r"^torchrun .*--run-dir runs/elastic": 1,
    r"--resume runs/elastic --mesh dp2 --batch-size 64": 2,
}
"""Exit codes of the commands that end otherwise than with 0. They are the last of their block."""
VARYING = r"^(pictures/\S+)? +\w+ +[\d.]+ %$|^step [\d,]+/.*$|(?<= ranks of ).*$|^dp2$"
"""Output that is not compared: the classes of a picture depend on the weights, lines of progress on the clock,
the processor's name and its fastest plan on the machine."""
EXPECTED = {
    r"^(mkdir|cp|cd|tar|export|trap|set)\b|^python -c|^vitpar predict .*> ": "",
    r"^python (block|experiments/)|^torchrun .*block.py": r"^ended: \w+|^written |^\| dp1 \|",
    r"^vitpar train .*--dry-run": r"^dry run: no training was started$",
    r"^vitpar train .*--run-dir runs/moving": r"^stopped by .*: `vitpar train --resume runs/moving` resumes it$",
    r"^torchrun .*--run-dir runs/elastic": r"^stopped by .* after step \d+",
    r"^vitpar train .*--batch-size 64 --device cpu$": r"^error: cannot resume",
    r"^vitpar train ": r"^done +\d",
    r"^vitpar data (pack .*--dry-run)": r"^  train: \d",
    r"^vitpar data (pack|index|info)": r"^(split +(samples|sequences) |text: )",
    r"^vitpar data verify": r" is complete$",
    r"^vitpar eval": r"^\d+ \w+ of '\w+': .*loss |^Split '|^\{\"samples\"",
    r"^vitpar predict": r"^image ",
    r"^vitpar features": r" features each ",
    r"^vitpar probe": r"^top-1 of ",
    r"^vitpar checkpoint import": r": from .* names, ",
    r"^vitpar checkpoint export": r" written to ",
    r"^vitpar checkpoint list": r"^step ",
    r"^vitpar checkpoint verify": r"all checksums match$",
    r"^vitpar check .*--json": r'"passed": true',
    r"^vitpar (check|plan .*--modules)": r"^passed: ",
    r"^vitpar plan .*--cluster": r"^memory  ",
    r"^vitpar plan": r" ranks?, fp32",
    r"^vitpar search": r"^searched |^ +cluster +devices ",
    r"^vitpar scaling": r"^strong scaling: ",
    r"^vitpar validate": r"^memory +[\d.]+% off",
    r"^vitpar profile": r"^written +(hardware|model).json$",
    r"^vitpar (board|report .*--live)": r"http://",
    r"^vitpar report": r"^written ",
    r"^vitpar galvatron": r"written",
    r"^vitpar (models|recipes|runs)": r"^ *(state|model|recipe|kind|source) ",
    r"^vitpar settings": r"^model.init ",
    r"^vitpar doctor --json": r'"problems": \[',
    r"^vitpar bench .*--json": r'"images_per_second": ',
    r"^vitpar bench": r"images/s",
}
"""Commands, and a line that they print. The first that matches counts."""


def commands(page: str) -> Iterator[list[str]]:
    """Yield the arguments of every `vitpar` command in the code blocks of a page."""
    for block in re.findall(r"^```[a-z]*\n(.*?)^```$", (ROOT / page).read_text(), re.M | re.S):
        for line in block.replace("\\\n", " ").splitlines():
            if re.match(r"vitpar [a-z]+ ", line) and "|" not in line and "…" not in line:
                yield shlex.split(line, comments=True)[1:]


def changed(block: Block) -> tuple[str, str]:
    """Return the commands that run for a block, and why they differ from those on the page."""
    text, reasons, lines = block.text.replace("\\\n", ""), [], []
    for page, words, instead, reason in CHANGED:
        if re.search(page, block.page) and re.search(words, text, re.M):
            text = re.sub(words, instead, text, flags=re.M)
            reasons.append(reason)
    for line in [] if block.language == "python" else text.splitlines():
        reason = next((reason for words, reason in SKIPPED.items() if re.search(words, line.partition(" #")[0])), None)
        (reasons if reason else lines).append(reason or line)
    if block.language == "python":
        alone = "init_process_group" not in text
        lines = ["python block.py" if alone else "torchrun --standalone --nproc-per-node 2 block.py"]
    return "\n".join(lines), "; ".join(dict.fromkeys(reasons))


def check(block: Block, text: str, place: Path, programs: Path, environment: dict[str, str]) -> None:
    """Run a block. Its commands must print their lines of EXPECTED and what the page shows, and write their files."""
    if block.language == "python":
        (place / "block.py").write_text(f"{block.text}\nprint('ended:', *globals())\n")
    code, output = run_block(text, place, programs, STOPS, environment)
    ran = [part.partition("\n") for part in output.split(MARK)[1:]]
    # A trap for Ctrl-C names the command that it ended once more.
    ran = [
        one
        for before, one in zip([None, *ran], ran, strict=False)
        if before is None or one[0] != before[0] or one[2].strip()
    ]
    wanted = next((code for words, code in CODES.items() if re.search(words, ran[-1][0])), 0)
    assert code == wanted, f"{block.name}: exit code {code}\n{output}"
    for command, _, printed in ran:
        line = next((line for words, line in EXPECTED.items() if re.search(words, command)), None)
        assert line is not None, f"{block.name}: EXPECTED has no line for '{command}'"
        assert re.search(line, printed, re.M), f"{block.name}: '{command}' does not print '{line}':\n{printed}"
        for file in re.findall(r"(?:--(?:out|report|preview|predictions|run-dir)|>) (\S+)", command):
            assert next(place.rglob(file), None), f"{block.name}: '{command}' does not write {file}"
    shown = re.sub(VARYING, "", block.shown, flags=re.M)
    assert not (lost := missing(shown, output)), f"{block.name}: not printed:\n" + "\n".join(lost) + output


FOUND = {page: list(blocks(page)) for page in PAGES if page not in (*GENERATED, *ELSEWHERE)}


@pytest.mark.slow
@pytest.mark.each_row
@pytest.mark.parametrize("page", [page for page, found in FOUND.items() if found])
def test_blocks_of_a_page_run(page: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    found = [(block, changed(block)[0]) for block in FOUND[page]]
    programs = command_folder(tmp_path_factory.mktemp("programs"))
    prepare(tmp_path, "\n".join(block.text + text for block, text in found), tmp_path_factory)
    with hub(tmp_path) as environment:
        for block, text in found:
            check(block, text, tmp_path, programs, environment)


def test_few_blocks_run_with_other_words_than_on_the_page() -> None:
    reasons = {block.name: changed(block)[1] for found in FOUND.values() for block in found}
    differing = [f"{name}: {reason}" for name, reason in reasons.items() if reason]
    assert len(differing) <= MOST_CHANGED, "\n".join(differing)


def parse(arguments: list[str]) -> None:
    """Parse a command line without running the command."""
    command = typer.main.get_command(app)
    context = command.make_context("vitpar", list(arguments))
    while hasattr(command, "resolve_command"):
        name, command, rest = command.resolve_command(context, context._protected_args + context.args)
        context = command.make_context(name, rest, parent=context)


@pytest.mark.parametrize("page", [page for page in PAGES if page not in GENERATED and list(commands(page))])
def test_every_documented_command_is_understood(page: str) -> None:
    wrong = []
    for arguments in commands(page):
        try:
            parse(arguments)
        except TyperException as error:
            wrong.append(f"vitpar {shlex.join(arguments)}: {error}")
    assert not wrong, "\n".join(wrong)


def test_commands_with_unknown_options_are_noticed() -> None:
    with pytest.raises(TyperException, match="--meshes"):
        parse(["train", "--meshes", "dp2"])
