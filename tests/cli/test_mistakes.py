"""Mistakes of every command: one sentence before any process starts, and what cannot be parsed."""

import shlex
import shutil
import sys
from pathlib import Path

import pytest

from helpers.command_line import Refused
from helpers.shared_runs import shared_run
from helpers.small_data import pack_small
from vitpar_cli.main import main

MISTAKES = [
    (["train", "--mesh", "foo"], "unknown role 'foo'"),
    (["train", "--mesh", "pp2xtp2xdp2"], ": make it with `vitpar data pack digits data_shards/digits`"),
    (["train", "--track", "mlflow"], "unknown tracker 'mlflow': use tensorboard, wandb or trackio"),
    (["check", "--mesh", "dp2xfoo"], "unknown role 'foo'"),
    (["bench", "--mesh", "foo"], "unknown role 'foo'"),
    (["plan", "dp2", "--hardware", "gone.json"], "cannot read the hardware profile gone.json"),
    (["search"], "cannot read the hardware profile hardware.json"),
    (["scaling"], "cannot read the hardware profile hardware.json"),
    (["models", "dino*v4"], "no published name has a part like 'dino*v4': `vitpar models` lists all"),
    (["models", "vit_bse_patch16_224"], "unknown model 'vit_bse_patch16_224' (did you mean 'vit_base_patch16_224'?)"),
    (["eval", "--checkpoint", "gone"], "'gone' holds no weights"),
    (["checkpoint", "info", "gone"], "there is no folder 'gone'"),
    (["data", "info", "gone"], "no data set at 'gone'"),
    (["report", "gone"], "there is no run 'gone'"),
    (["runs", "gone"], "there is no folder 'gone'"),
]


def test_mistakes_of_every_command_are_refused(tmp_path: Path, refused: Refused) -> None:
    refused(tmp_path, MISTAKES)


WRONG_RUNS = [
    ("--set data.crop_scale=[0.5,0.2]", "crop scale (0.5, 0.2) must be a range"),
    ("--set model.drop_path=0 --set train.drop_path_schedule=late(after=1)", "has no stochastic depth"),
    ("--mesh dp2+zero2 --schedule zbvzerobubble", "schedule zbvzerobubble needs pp"),
    ("--set train.attention=cudnn --device cpu", "train.attention 'cudnn' does not run on a cpu device"),
    ("--batch-size 16000000 --set model.image_size=2048", "use a smaller --batch-size"),
    ("--run-dir data", "the run folder 'data' exists and is not empty"),
    ("--data no_val --set checkpoint.keep_best=true", "'no_val' has no val split"),
    ("--weights gone", "--weights 'gone' does not exist"),
    ("--mesh auto --schedule gpipe --split even", "parallel.split is searched with --mesh auto"),
    ("--resume run --batch-size 16", "these settings changed: train.batch_size was 8 and is 16"),
]


def test_wrong_settings_of_a_training_are_refused(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, refused: Refused
) -> None:
    place = shutil.copytree(shared_run("small", tmp_path_factory), tmp_path / "place")
    pack_small(tmp_path / "other", val=False).rename(place / "no_val")
    rows = [(shlex.split(words), message) for words, message in WRONG_RUNS]
    refused(place, rows, "train", "--recipe", "recipe.toml")


def said(words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> tuple[str, int]:
    """Return what `vitpar <words>` prints on stderr, and its exit code."""
    monkeypatch.setattr(sys, "argv", ["vitpar", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    assert isinstance(ended.value.code, int)
    return capsys.readouterr().err, ended.value.code


UNPARSED = [
    ("train --lr 1", "vitpar train has no option --lr: use --set optimizer.lr=VALUE"),
    ("train --recip x", "vitpar train has no option --recip (did you mean '--recipe'?)"),
    ("train --qqq", "vitpar train has no option --qqq: see --help"),
    ("train dp2", "unexpected argument dp2: give it as --mesh dp2"),
    ("eval --checkpoint x runs/x", "unexpected argument runs/x: give it as --checkpoint runs/x"),
    ("eval", "missing option '--checkpoint': see `vitpar eval --help`"),
    ("train --mesh dp2 --json true", "--json takes no value: leave true out"),
    ("scaling dp2", "unexpected argument dp2: see `vitpar scaling --help`"),
    ("train --steps many", "invalid value for '--steps': Input should be a valid integer"),
    ("search --cluster H100", "cluster 'H100' does not say how many devices: use 8xH100, or 4x8xH100"),
    ("search --hardware no.json", "make one with `vitpar profile hardware`, or plan from a data sheet with --cluster"),
    ("plan fsdp2+zero3", "use the role fsdp instead of dp, which shards parameters as ZeRO-3 does"),
    ("settings wd2", "unknown setting 'wd2'"),
    ("fly", "no such command 'fly'"),
]


def test_usage_errors_are_one_line_with_a_remedy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for words, sentence in UNPARSED:
        printed, code = said(words.split(), monkeypatch, capsys)
        assert code == 2 and printed.startswith("error: ") and sentence in printed, (words, printed)
        assert len(printed.splitlines()) == 1 and "╭" not in printed, (words, printed)


def test_home_folder_is_expanded_in_every_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Shells leave the ~ of --out=~/plan.json, and so of --set data.path=~/images."""
    (tmp_path / "here").mkdir()
    (tmp_path / "~").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("HOME", str(tmp_path))
    for words in (["--out=~/plan.json"], ["--out", "~/plan.json"]):
        assert said(["plan", "dp2", *words], monkeypatch, capsys)[1] == 0
        assert (tmp_path / "plan.json").exists() and not any((tmp_path / "here").iterdir())
        (tmp_path / "plan.json").unlink()
    printed, _ = said(["train", "--set", "data.path=~/images", "--dry-run"], monkeypatch, capsys)
    assert f"no data set at '{tmp_path}/images'" in printed
    sentence = "error: the name 'b\\udce4r' is not UTF-8: rename it\n"
    assert said(["report", "b\udce4r"], monkeypatch, capsys) == (sentence, 2)


def test_help_and_version_are_not_errors(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert said(["--version"], monkeypatch, capsys) == ("", 0)
    assert said(["train", "--help"], monkeypatch, capsys) == ("", 0)
    assert said(["settings", "wd"], monkeypatch, capsys) == ("", 0)
    monkeypatch.setattr(sys, "argv", ["vitpar", "data", "pack", "--help"])
    with pytest.raises(SystemExit):
        main()
    printed = capsys.readouterr().out
    assert "--overwrite" in printed and not [odd for odd in ("<bool>", "x<=", "[default: (") if odd in printed]
    monkeypatch.setattr(sys, "argv", ["vitpar"])
    with pytest.raises(SystemExit) as ended:
        main()
    printed = capsys.readouterr()
    assert ended.value.code == 2 and printed.err == "" and printed.out.count("Usage: vitpar") == 1
