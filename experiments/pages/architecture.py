"""Layers of the package by its imports: packages on floors, and the ways of four things through the modules.

A package may import only packages on lower floors, and modules must not import each other in a cycle. Imports inside
functions count; those under TYPE_CHECKING do not.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FLOORS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("commands", ("vitpar_cli",)),
    ("front door", ("vitpar",)),
    ("tools", ("bench", "runs")),
    ("", ("check", "planner", "doctor")),
    ("training", ("training",)),
    ("", ("training.faults",)),
    ("", ("training.saving",)),
    ("", ("training.optim", "training.tracking")),
    ("tasks", ("tasks",)),
    ("", ("recipe",)),
    ("model and state", ("copying", "weights")),
    ("", ("parallel", "data", "checkpoint", "runs.pages")),
    ("plans and ranks", ("strategy", "launch")),
    ("models", ("models",)),
    ("ground", ("intervals", "io", "kernels", "records", "sharded", "sizes", "threads")),
    ("", ("object_store", "own_files")),
    ("", ("errors",)),
    ("", ("text",)),
    ("", ("limits", "terminal")),
)
"""Floors from top to bottom: (name, packages). An empty name means the name of the floor above.

Packages on one floor must not import each other.
"""
WIDTH = 40
"""Characters of the package column in the picture."""
Step = tuple[str, str, str]
"""(file below src/vitpar or cli/, name of a function or class in it, what it does)."""
WALKS: dict[str, tuple[int, tuple[Step, ...]]] = {
    "From a strategy string to a collective": (
        13,
        (
            ("cli/vitpar_cli/train.py", "train", "takes the option `--mesh`"),
            ("training/prepare.py", "prepare", "checks all settings in order, and has the plan chosen"),
            ("recipe/recipe.py", "requested_plans", "parses what the recipe asks for"),
            ("strategy/grammar.py", "parse", "makes a `Plan` (`strategy/plan.py`), or points at what is wrong"),
            ("strategy/validate.py", "validate", "compares it with the model and the batch"),
            ("cli/vitpar_cli/world.py", "run_in_world", "starts the ranks, or joins those a launcher started"),
            ("training/build.py", "build", "makes all that trains, with the recipe's settings as an `Execution`"),
            ("parallel/parallelize.py", "parallelize", "wraps this rank's layers in order, by `strategy/execution.py`"),
            ("parallel/tensor.py", "apply_tensor_parallel", "applies a layer's plan by `parallelize_module`"),
            ("parallel/linear.py", "gathered_linear", "sends and receives, forward and backward"),
        ),
    ),
    "From a tar file to the device": (
        10,
        (
            (
                "tasks/image_input.py",
                "train_batches",
                "makes a loader of this rank's rows; `train_step` copies batches",
            ),
            ("data/loader.py", "TrainLoader", "chooses samples, and reads and decodes them in threads"),
            ("data/randomness.py", "SampleOrder", "says which sample comes when; `sample_keys` gives its key"),
            ("data/shards/manifest.py", "read_rows", "has shard, offset, size and checksum of every sample"),
            ("data/shards/shard_set.py", "ShardSet", "reads a sample by one `pread`, and compares the checksum"),
            ("io.py", "open_regular", "opens a shard, and nothing but a regular file"),
            ("data/images.py", "decode", "turns encoded bytes into pixels, uint8 [height, width, 3]"),
            ("data/transforms/sample.py", "TrainTransform", "crops, flips and augments, by the samples' keys"),
            ("data/transforms/policies.py", "RandAugment", "changes colours and shapes, where the recipe has a policy"),
            ("data/transforms/batch.py", "Normalize", "makes floats of pixels on the device; `Mix` mixes images"),
        ),
    ),
    "From a measurement to a price": (
        7,
        (
            ("cli/vitpar_cli/profile.py", "model", "takes the command `vitpar profile model`"),
            ("planner/measure/layer_bench.py", "LayerBench", "runs one layer of a rank, with nobody else"),
            ("planner/measure/clock.py", "Clock", "takes its time beside a fixed piece of work"),
            ("planner/profile/profiles.py", "ModelProfile", "keeps it as a `Curve` (`curves.py`), and as JSON"),
            ("planner/cost/layer.py", "LayerCosts", "gives a layer's seconds and bytes under a strategy"),
            ("planner/cost/stage.py", "StageCost", "adds layers up to a stage, and what is sent beside them"),
            ("planner/cost/price.py", "price", "replays the stages of a step, and walks through its memory"),
        ),
    ),
    "From one plan's parameters to another's, through a checkpoint": (
        10,
        (
            ("training/trainer.py", "Trainer", "saves checkpoints between updates, and resumes from one"),
            ("training/saving/saver.py", "TrainingState", "names the tensors of model, optimizer and average"),
            ("checkpoint/writer.py", "Writer", "copies them to the host, and writes in a thread"),
            ("checkpoint/writer.py", "divide", "says which rank writes which part of a tensor"),
            ("checkpoint/image.py", "SafetensorsBuffer", "lays a rank's parts out as the bytes of a file"),
            ("checkpoint/atomic.py", "publish", "makes files appear whole or not at all"),
            ("checkpoint/index.py", "Index", "says where every part of every tensor is"),
            ("training/saving/resume.py", "find", "finds the newest whole checkpoint"),
            ("checkpoint/folder.py", "Checkpoint", "is one, its files checked against the index"),
            ("checkpoint/reader.py", "load_tensors", "reads the parts that this rank needs under its plan"),
        ),
    ),
}
"""Walks through the source by title: most files that a walk may have, and its steps."""


def modules() -> dict[str, Path]:
    """Return the files of the library and the commands, by module name."""
    found = {}
    for source in (ROOT / "src", ROOT / "cli"):
        for path in source.rglob("*.py"):
            parts = path.relative_to(source).with_suffix("").parts
            found[".".join(part for part in parts if part != "__init__")] = path
    return found


def imports(known: Mapping[str, Path]) -> dict[str, set[str]]:
    """Return the modules that each module imports, including imports inside functions."""
    return {name: set(_imported(ast.parse(path.read_text(encoding="utf-8")), known)) for name, path in known.items()}


def _imported(tree: ast.AST, known: Mapping[str, Path]) -> Iterator[str]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.ImportFrom) and node.module in known:
            for alias in node.names:
                inside = f"{node.module}.{alias.name}"
                yield inside if inside in known else node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        yield from _imported(node, known)


def package(module: str) -> str:
    """Return the package of `FLOORS` that contains a module."""
    names = {name for _, floor in FLOORS for name in floor}
    parts = module.removeprefix("vitpar.").split(".")
    return next((name for end in (2, 1) if (name := ".".join(parts[:end])) in names), "vitpar")


def upwards(graph: Mapping[str, set[str]]) -> list[str]:
    """Return a message for each import of a package that is not on a lower floor."""
    height = {name: -number for number, (_, floor) in enumerate(FLOORS) for name in floor}
    wrong = []
    for module, others in sorted(graph.items()):
        for other in sorted(others):
            here, there = package(module), package(other)
            if here != there and height[there] >= height[here]:
                wrong.append(f"{module} imports {other}, which is not on a floor below")
    return wrong


def cycles(graph: Mapping[str, set[str]]) -> list[str]:
    """Return a message for each import cycle that a depth-first search finds."""
    wrong: list[str] = []
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        if module in path:
            wrong.append(" imports ".join((*path[path.index(module) :], module)))
        elif module not in done:
            for other in sorted(graph[module]):
                visit(other, (*path, module))
            done.add(module)

    for module in sorted(graph):
        visit(module, ())
    return wrong


def page() -> str:
    """Return the text of docs/architecture.md."""
    known = modules()
    graph = imports(known)
    text = textwrap.fill(
        "Packages import downwards only, and no module imports itself by a detour: `tests/test_architecture.py` fails "
        "otherwise. Written by `make docs` from the imports and the first lines of the packages "
        "(`experiments/pages/architecture.py`). How the parts fit together: [design.md](design.md).",
        140,
        break_long_words=False,
    )
    picture = []
    for name, floor in FLOORS:
        if name:
            left, middle, right = "├┼┤" if picture else "┌┬┐"
            picture.append(f"{left}{'─' * 17}{middle}{'─' * WIDTH}{right}")
        picture.append(f"│ {name:<16}│ {'   '.join(floor):<{WIDTH - 1}}│")
    picture = ["```text", *picture, f"└{'─' * 17}┴{'─' * WIDTH}┘", "```"]
    rows = ["| package | holds | imports |", "|---|---|---|"]
    for _, floor in FLOORS:
        for name in floor:
            inside = [module for module in known if package(module) == name]
            below = sorted({package(other) for module in inside for other in graph[module]} - {name})
            rows.append(f"| `{name}` | {_holds(name, known)} | {', '.join(_shortest(below, graph))} |")
    about = "The last column leaves out what others in it import."
    walks = ["## Four walks", "", "How to follow four things through the source, file by file."]
    for name, (_, steps) in WALKS.items():
        walks += ["", f"### {name}", ""]
        walks += [f"{n}. `{file}`, `{what}`: {happens}" for n, (file, what, happens) in enumerate(steps, start=1)]
    return "\n".join(["# Architecture", "", text, "", *picture, "", *rows, "", about, "", *walks]) + "\n"


def lost() -> list[str]:
    """Return a message for each step of a walk whose file or name does not exist, and for each too long walk."""
    wrong = []
    for name, (most, steps) in WALKS.items():
        if len(steps) > most:
            wrong.append(f"'{name}' leads through {len(steps)} files, more than {most}")
        for file, what, _ in steps:
            path = ROOT / file if file.startswith("cli/") else ROOT / "src/vitpar" / file
            if not path.is_file() or not re.search(rf"^\s*(def|class) {what}\b", path.read_text("utf-8"), re.MULTILINE):
                wrong.append(f"'{name}': {file} has no {what}")
    return wrong


def _holds(name: str, known: Mapping[str, Path]) -> str:
    """Return the first paragraph of a package's docstring, without the full stop."""
    module = name if name in known else f"vitpar.{name}"
    text = ast.get_docstring(ast.parse(known[module].read_text(encoding="utf-8"))) or ""
    return " ".join(text.partition("\n\n")[0].split()).removesuffix(".")


def _shortest(packages: list[str], graph: Mapping[str, set[str]]) -> list[str]:
    """Return those of `packages` that no other one of them imports, directly or indirectly."""
    reach: dict[str, set[str]] = {}

    def reached(name: str) -> set[str]:
        if name not in reach:
            reach[name] = set()
            direct = {package(other) for module in graph if package(module) == name for other in graph[module]} - {name}
            reach[name] = direct.union(*map(reached, direct))
        return reach[name]

    return [f"`{one}`" for one in packages if not any(one in reached(other) for other in packages if other != one)]
