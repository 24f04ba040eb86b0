"""Commands that need no torch run without importing it, which takes seconds: refused mistakes, plans and searches."""

import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest
import torch

from helpers.command_line import run, run_without_torch
from helpers.shared_runs import shared_run
from helpers.small_data import pack_small
from vitpar.launch import resources

MISTAKES = [
    (["train", "--mesh", "foo"], "unknown role 'foo'"),
    (["train", "--data", "gone"], "no data set at 'gone'"),
    (["train", "--mesh", "pp2xtp2xdp2"], ": make it with `vitpar data pack digits data_shards/digits`\n"),
    (["train", "--track", "mlflow"], "unknown tracker 'mlflow': use tensorboard, wandb or trackio"),
    (["check", "--mesh", "dp2xfoo"], "unknown role 'foo'"),
    (["bench", "--mesh", "foo"], "unknown role 'foo'"),
    (["plan", "foo"], "unknown role 'foo'"),
    (["plan", "dp2", "--hardware", "gone.json"], "cannot read the hardware profile gone.json"),
    (["search"], "cannot read the hardware profile hardware.json"),
    (["scaling"], "cannot read the hardware profile hardware.json"),
    (["models", "dino*v4"], "no published name has a part like 'dino*v4': `vitpar models` lists all"),
    (["models", "vit_bse_patch16_224"], "unknown model 'vit_bse_patch16_224' (did you mean 'vit_base_patch16_224'?)"),
    (["eval", "--checkpoint", "gone"], "'gone' holds no weights"),
    (["checkpoint", "list", "gone"], "there is no folder 'gone'"),
    (["checkpoint", "info", "gone"], "there is no folder 'gone'"),
    (["data", "info", "gone"], "no data set at 'gone'"),
    (["data", "verify", "gone"], "no data set at 'gone'"),
    (["report", "gone"], "there is no run 'gone'"),
    (["runs", "gone"], "there is no folder 'gone'"),
    (["settings", "train.sed"], "unknown setting 'train.sed'"),
]


def test_mistakes_are_refused_without_importing_torch(tmp_path: Path) -> None:
    commands = [words for words, _ in MISTAKES]
    for done, (words, message) in zip(run_without_torch(tmp_path, commands), MISTAKES, strict=True):
        assert done.returncode == 2 and message in done.stderr, (words, done.stderr)


WRONG_RUNS = [
    ("--set data.crop_scale=[0.5,0.2]", "crop scale (0.5, 0.2) must be a range"),
    ("--set model.drop_path=0 --set train.drop_path_schedule=late(after=1)", "has no stochastic depth"),
    ("--mesh dp2+zero2 --schedule zbvzerobubble", "schedule zbvzerobubble needs pp"),
    ("--set communication.prefetch=2", "communication.prefetch is 2, which does nothing with 'dp1' in fp32"),
    ("--set train.attention=cudnn --device cpu", "train.attention 'cudnn' does not run on a cpu device"),
    ("--batch-size 16000000 --set model.image_size=2048", "use a smaller --batch-size"),
    ("--run-dir data", "the run folder 'data' exists and is not empty"),
    ("--data no_val --set checkpoint.keep_best=true", "'no_val' has no val split"),
    ("--weights gone", "--weights 'gone' does not exist"),
    ("--mesh auto --schedule gpipe --split even", "parallel.split is searched with --mesh auto"),
    ("--resume run --batch-size 16", "these settings changed: train.batch_size was 8 and is 16"),
]


def test_wrong_settings_of_a_training_are_refused_without_importing_torch(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Settings, the index of the data, the plan and a checkpoint are checked before torch is imported."""
    place = shutil.copytree(shared_run("small", tmp_path_factory), tmp_path / "place")
    pack_small(tmp_path / "other", val=False).rename(place / "no_val")
    commands = [["train", "--recipe", "recipe.toml", *shlex.split(words)] for words, _ in WRONG_RUNS]
    for done, (words, message) in zip(run_without_torch(place, commands), WRONG_RUNS, strict=True):
        assert done.returncode == 2 and message in done.stderr, (words, done.stderr)


SMALL = "--model vit_small_patch16_224 --batch-size 256"
WHOLE = "--seconds 100"
"""Option of searches that must not end early, since slow machines would print others."""
WORKING = [
    f"plan pp2xtp2xdp2 {SMALL} --modules --json --out plan.json",
    "plan 'pp2: embed=fsdp4, stage2=tp2xfsdp2+sp, *=fsdp4+ckpt' --model swin_tiny_patch4_window7_224 --modules",
    "plan 'pp2: encoder=tp2+sp, *=fsdp2' --model t5_small --modules",
    "plan dp --world-size 4 --recipe digits --set optimizer.name=muon --set train.ema_decay=0.9",
    f"plan fsdp8 {SMALL} --cluster 8xH100 --epochs 90 --json",
    f"search --cluster 2xH100 --model google-bert/bert-base-uncased --batch-size 16 {WHOLE} --json",
    f"search --cluster 2xA100 {SMALL} {WHOLE} --memory 4GB --roles dp,fsdp --out plan.json --report page --trace step",
    f"search --cluster 1xA100,1xL40S --model vit_small_patch16_224,swin_tiny_patch4_window7_224 --batch-size 8 {WHOLE}",
    f"scaling --cluster 2xH100 {SMALL}",
    "recipes mae_finetune_base",
]
"""Plans and searches of every kind of output."""
DURATION = re.compile(r'(?<=searched   )[0-9.]+|(?<="search_seconds": )[0-9.e-]+|[0-9.]+(?= s over [0-9]+ strateg)')
"""Seconds that a search took."""


@pytest.mark.parametrize("words", WORKING)
def test_plans_and_searches_are_the_same_without_torch(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    folders = (tmp_path / "without", tmp_path / "with")
    for folder in folders:
        folder.mkdir()
    (found,) = run_without_torch(folders[0], [shlex.split(words)])
    assert found.returncode == 0, found.stderr
    usual = run(folders[1], shlex.split(words))
    assert DURATION.sub("", found.stdout) == DURATION.sub("", usual.stdout)
    written, expected = ({path.name: path.read_text() for path in folder.iterdir()} for folder in folders)
    assert len(written) == len(re.findall("--(?:out|report|trace) ", words))
    assert {name: DURATION.sub("", text) for name, text in written.items()} == {
        name: DURATION.sub("", text) for name, text in expected.items()
    }


def test_torch_is_asked_for_gpus_only_where_a_driver_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(resources, "GPU_DRIVERS", (str(tmp_path),))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert resources.has_cuda()
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ImportError):
        resources.has_cuda()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert not resources.has_cuda()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(resources, "GPU_DRIVERS", (str(tmp_path / "gone"),))
    assert not resources.has_cuda()
