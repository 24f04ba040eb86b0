"""Mistakes that can be found without torch are refused without importing it, which takes seconds."""

from pathlib import Path

from helpers.command_line import run_without_torch

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
