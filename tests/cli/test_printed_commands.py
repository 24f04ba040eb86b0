"""Commands that vitpar prints, pasted back: they run, with the same model, task and plan."""

import re
import shlex
import signal
import subprocess
import time
import tomllib
from pathlib import Path

import pytest

from helpers.command_line import Command, forked, run
from helpers.foreign_weights import TIMM_CONFIG, saved, timm_state
from helpers.tiny_text import documents
from vitpar.strategy import parse
from vitpar.strategy.plan_json import read_plan

VIT = "--data data --model vit_nano_patch5_10 --set model.depth=2 --batch-size 8"
BERT = "--task mlm --data text --model bert_custom --batch-size 8"
BERT += "".join(f" --set model.{key}" for key in ("embed_dim=16", "depth=2", "num_heads=2", "mlp_hidden_dim=32"))
MAE = "--task mae --data data --model mae_custom --batch-size 8"
MAE += "".join(
    f" --set model.{key}" for key in ("image_size=10", "patch_size=5", "embed_dim=24", "depth=2", "num_heads=2")
)
MAE += " --set model.options.decoder_embed_dim=16 --set model.options.decoder_depth=1"
TRAININGS = {"classify": VIT, "mlm": BERT, "mae": MAE}


@pytest.fixture(scope="module")
def texts(place: Path, vitpar: Command) -> Path:
    """Return the folder with images in `data` and text in `text`."""
    (place / "corpus.txt").write_text("\n\n".join(documents(60)))
    assert vitpar("data", "pack", "corpus.txt", "text", "--tokens", "30").returncode == 0
    return place


def commands(done: "subprocess.CompletedProcess[str]") -> list[list[str]]:
    """Return the words of every command that a command printed, after its name or in backticks."""
    lines = re.findall(r"^(?:\w+ +)?(vitpar [a-z].*)$|`(vitpar [^`]+)`", done.stdout + done.stderr, re.M)
    return [shlex.split(line or quoted)[1:] for line, quoted in lines]


def pasted(place: Path, words: list[str], *more: str) -> "subprocess.CompletedProcess[str]":
    """Run a printed command in the folder that it was printed in, with `more` words."""
    done = run(place, [*words, *more])
    assert done.returncode == 0, f"vitpar {shlex.join(words)}: {done.stdout}{done.stderr}"
    return done


def trained(run_dir: Path) -> tuple[str, dict[str, object], str]:
    """Return task, model and plan of a run."""
    recipe = tomllib.loads((run_dir / "recipe.toml").read_text())
    plan = read_plan(run_dir / "plan.json")
    return recipe.get("task", {}).get("name", "classify"), recipe["model"], str(plan)


@pytest.mark.parametrize("task", TRAININGS)
def test_lines_at_the_end_of_a_training(task: str, texts: Path) -> None:
    done = pasted(texts, ["train", *shlex.split(TRAININGS[task]), "--steps", "1", "--run-dir", f"runs/{task}"])
    (loss,) = re.findall(r"^result +val loss (\S+)", done.stdout, re.M)
    found = {words[0]: words for words in commands(done)}
    assert found.keys() >= {"eval", "report"}
    assert f"loss {loss}" in pasted(texts, found.pop("eval")).stdout
    assert "written" in pasted(texts, found.pop("report"), "--out", f"{task}.html").stdout
    for words in found.values():  # fine-tuning of a masked autoencoder
        pasted(texts, words, "--dry-run")


@pytest.mark.parametrize("task", ["classify", "mlm"])
def test_the_line_of_search_trains_what_was_searched(task: str, texts: Path) -> None:
    words = shlex.split(TRAININGS[task].replace("depth=2", "depth=4"))
    done = pasted(texts, ["search", "--cluster", "2xA100-40GB", "--roles", "dp,tp", "--precision", "fp32", *words])
    (line,) = [words for words in commands(done) if words[0] == "train"]
    pasted(texts, line, "--steps", "1", "--device", "cpu", "--run-dir", f"runs/searched-{task}")
    name, model, plan = trained(texts / f"runs/searched-{task}")
    assert (name, model["depth"], plan) == (task, 4, str(parse(done.stdout.splitlines()[0])))


def test_the_line_of_a_stopped_run_resumes_it(texts: Path) -> None:
    process = forked(
        texts, ["train", *shlex.split(VIT), "--steps", "4000", "--mesh", "dp2", "--run-dir", "runs/stopped"]
    )
    metrics = texts / "runs/stopped/metrics.jsonl"
    while not (metrics.exists() and '"train"' in metrics.read_text()) and process.poll() is None:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=100)
    assert process.returncode == 75, out + err
    (words,) = commands(subprocess.CompletedProcess([], 75, out, err))
    before = trained(texts / "runs/stopped")
    rows = len(metrics.read_text().splitlines())
    pasted(texts, words, "--steps", str(rows + 50), "--allow-change", "train.steps")
    assert trained(texts / "runs/stopped") == before


def test_lines_of_imports_plans_and_recipes(texts: Path) -> None:
    saved(texts / "downloaded", timm_state(), TIMM_CONFIG)
    for options, command in (((), "eval"), (("--classes", "7"), "eval"), (("--classes", "9"), "train")):
        place = f"weights/{len(options)}{command}"
        done = pasted(texts, ["checkpoint", "import", "downloaded", "--out", place, *options])
        (words,) = commands(done)
        assert words[0] == command
        more = ["--dry-run"] if command == "train" else []
        pasted(texts, ["data" if word == "DIR" else word for word in words], *more)
    pasted(texts, ["galvatron", "export", "fsdp2", *shlex.split(VIT)[2:], "--out", "galvatron.json"])
    done = pasted(texts, ["galvatron", "import", "galvatron.json", "--world-size", "2", "--out", "plan.json"])
    (options,) = re.findall(r"train with (.*)$", done.stdout, re.M)
    done = pasted(texts, ["train", *shlex.split(VIT), *options.split(), "--steps", "1", "--run-dir", "runs/imported"])
    assert trained(texts / "runs/imported")[2] == "fsdp2"


def test_hints_of_errors_lead_to_a_training(tmp_path: Path) -> None:
    failed = run(tmp_path, ["train", "--steps", "1"])
    assert failed.returncode == 2
    (words,) = commands(failed)
    pasted(tmp_path, words)
    (line,) = [words for words in commands(pasted(tmp_path, ["recipes", "digits"])) if words[0] == "train"]
    assert "dry run" in pasted(tmp_path, line, "--dry-run").stdout
