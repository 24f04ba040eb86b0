"""Files that pages of the documentation take as given, by the names of the pages: tiny ones, made once in a session."""

import fcntl
import json
import os
import re
import shutil
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from helpers.archives import cifar_files, write_imagenet
from helpers.command_line import run
from helpers.foreign_weights import as_transformers, saved, timm_state, transformers_config
from helpers.galvatron_2022 import write_profiles
from helpers.galvatron_files import LAYERWISE
from helpers.galvatron_models import write_shipped_profile
from helpers.hub_server import Hub, serving
from helpers.paths import ROOT
from helpers.ranks import RankPool
from helpers.small_data import pack_small
from helpers.streamed_shards import write_shards
from helpers.tiny_images import encoded, write_tree
from helpers.tiny_text import documents, write_tokenizer
from vitpar.models import model_config
from vitpar.planner.measure.hardware import MeasureEffort, profile_hardware
from vitpar.planner.profile.profiles import Hardware

PLACES = ("docs", "examples", "experiments", "src", "tests", "constraints.txt", "Makefile")
"""Folders and files of a clone that pages name."""
RECIPE = """
[model]
name = "vit_custom"
image_size = 8
patch_size = 4
embed_dim = 24
depth = 4
num_heads = 4

[data]
path = "data_shards/mine"

[train]
batch_size = 16
steps = 20
eval_every = 10

[checkpoint]
every = 10
keep = 0
"""


def vitpar(folder: Path, *words: str) -> None:
    """Run a command in `folder`."""
    done = run(folder, words)
    assert done.returncode == 0, f"vitpar {words}: {done.stdout}{done.stderr}"


def photos(path: Path) -> None:
    for number, name in enumerate(("cats", "dogs")):
        (path / name).mkdir(parents=True)
        for image in range(8):
            (path / name / f"{image}.jpg").write_bytes(encoded(10 * number + image, "JPEG"))


def packed(path: Path) -> None:
    made = pack_small(path.parent / f"{path.name}.source")
    made.rename(path)
    shutil.rmtree(path.parent / f"{path.name}.source")


def digits(path: Path) -> None:
    vitpar(path.parent, "data", "pack", "digits", path.name)


def text(path: Path) -> None:
    path.write_text("\n\n".join(documents(300)))


def packed_text(path: Path) -> None:
    corpus = path.parent / "corpus.txt"
    text(corpus)
    vitpar(path.parent, "data", "pack", corpus.name, path.name, "--tokens", "126")
    corpus.unlink()


def shards(path: Path) -> None:
    for split, sizes in (("train", (20, 20)), ("val", (10,))):
        write_shards(path, split, sizes, classes=4)


def cifar(path: Path) -> None:
    """Write CIFAR-10 as a folder, or as its archive."""
    folder = path.parent / "cifar-10-batches-py" if path.suffix else path
    folder.mkdir(parents=True)
    for name, content in cifar_files(False, False, count=40)[0].items():
        (folder / name).write_bytes(content)
    if path.suffix:
        with tarfile.open(path, "w:gz") as tar:
            tar.add(folder, folder.name)


def downloaded(path: Path) -> None:
    """Write a ViT of 12 blocks as transformers saves it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    state = timm_state()
    for name in [name for name in state if name.startswith("blocks.0.")]:
        state |= {name.replace(".0.", f".{block}.", 1): state[name].clone() for block in range(2, 12)}
    saved(path, as_transformers(state), transformers_config(num_hidden_layers=12))


def weights(path: Path) -> None:
    downloaded(path.parent / "downloaded")
    vitpar(path.parent, "checkpoint", "import", "downloaded", "--out", path.name)
    shutil.rmtree(path.parent / "downloaded")


def published(path: Path) -> None:
    """Write random weights of a published model, as timm saves them."""
    from safetensors.torch import save_file

    from helpers.oracles import timm

    torch_file = path.suffix == ".pth"
    name = "deit_tiny_distilled_patch16_224" if torch_file else "vit_tiny_patch16_224"
    (torch.save if torch_file else save_file)(timm.create_model(name).state_dict(), path)


def tutorial_recipe(path: Path) -> None:
    """Write the recipe that the first tutorial writes, with a smaller model."""
    page = (ROOT / "docs/tutorials/train-on-your-images.md").read_text()
    recipe = re.findall(r"^```toml\n(.*?)^```$", page, re.M | re.S)[0]
    path.write_text(recipe.replace("embed_dim = 64\ndepth = 4", "embed_dim = 16\ndepth = 2"))


def trained(path: Path) -> None:
    """Train with the recipe on the data that its folder has beside it."""
    place = path.parents[1]
    (place / "data_shards").mkdir(exist_ok=True)
    packed(place / "data_shards/mine")
    (place / "r.toml").write_text(RECIPE)
    vitpar(place, "train", "--recipe", "r.toml", "--run-dir", str(path.relative_to(place)))


def features(path: Path) -> None:
    place = path.parent / "features"
    trained(place / "runs/mine")
    vitpar(place, "features", "--data", "data_shards/mine", "--data-split", path.stem, "--checkpoint", "runs/mine",
           "--out", f"../{path.name}")  # fmt: skip
    shutil.rmtree(place)


def little_profile(device: torch.device) -> Hardware:
    effort = MeasureEffort(0.002, ("float32", "bfloat16"), (16, 64), (2**10, 2**20), (2**12, 2**20))
    return profile_hardware("2xcpu", device, 2, effort)


def hardware(path: Path) -> None:
    """Write a profile of two ranks of this machine, measured in few points."""
    pool = RankPool(2)
    pool.run(little_profile)[0].save(path)
    pool.close()


def t5_config(path: Path) -> None:
    options = ("--model", "t5_large", "--batch-size", "8")
    vitpar(path.parent, "galvatron", "export", "fsdp8", *options, "--out", path.name)


def galvatron_profiles(path: Path) -> None:
    """Write a folder of profiles of the hardware, or of the model that is the folder's name, in bf16."""
    path.mkdir()
    if path.name in ("bert-large", "t5-3b"):
        return write_shipped_profile(path, model_config(path.name.replace("-", "_")))
    write_profiles(path)
    for file in path.glob("*fp32_all*"):
        file.rename(path / file.name.replace("fp32_all", "bf16"))


GIVEN: dict[str, Callable[[Path], object]] = {
    "PATH/TO/images": write_tree,
    "PATH/TO/imagenet": write_imagenet,
    "PATH/TO/shards": shards,
    "data_shards/imagenet-wds": shards,
    "PATH/TO/cifar10": cifar,
    "cifar-10-python.tar.gz": cifar,
    "photos": photos,
    "photo.png": lambda path: path.write_bytes(encoded(0)),
    "data_shards/digits": digits,
    **dict.fromkeys((f"data_shards/{name}" for name in ("mine", "other", "imagenet", "flowers", "theirs")), packed),
    "corpus.txt": text,
    "tokenizer.json": lambda path: write_tokenizer(path, "bert"),
    "data_shards/text": packed_text,
    "data_shards/corpus": packed_text,
    "PATH/TO/vit-base-patch16-224": downloaded,
    "downloads/vit-base-patch16-224": downloaded,
    "weights/base": weights,
    "deit.pth": published,
    "model.safetensors": published,
    **dict.fromkeys(("r.toml", "recipe.toml"), lambda path: path.write_text(RECIPE)),
    "mine.toml": tutorial_recipe,
    "runs/mine": trained,
    "runs/other": trained,
    "train.parquet": features,
    "val.parquet": features,
    "hardware.json": hardware,
    "galvatron_config.json": lambda path: path.write_text(json.dumps(LAYERWISE)),
    "t5_config.json": t5_config,
    **dict.fromkeys(("HARDWARE", "vit-huge", "bert-large", "t5-3b"), galvatron_profiles),
}
"""The function that writes each file or folder."""

IMPLIED = {
    "r.toml": " data_shards/mine",
    "recipe.toml": " data_shards/mine",
    "mine.toml": " data_shards/mine",
    "validate plan.json fsdp2": " hardware.json",
    "runs/mine": " data_shards/mine",
    "--recipe digits": " data_shards/digits",
    "/digits.toml": " data_shards/digits",
}
"""Files that a page needs if it names another one."""


def first_made(name: str, commands: str) -> bool:
    """Whether the commands of a page make `name` themselves before they use it."""
    use = re.search(rf"(\S+) +(\S+) +{re.escape(name)}(?![\w.-])", f"\n . . {commands}")
    return use is not None and (use[2] in ("--out", "--run-dir", ">") or use[1] == "pack")


def prepare(place: Path, commands: str, factory: pytest.TempPathFactory) -> None:
    """Give the folder `place` what a clone has, and the GIVEN files that `commands` name and do not make."""
    for name in PLACES:
        (place / name).symlink_to(ROOT / name)
    (place / "own_model.py").symlink_to(ROOT / "examples/own_model.py")
    commands += " ".join(implied for name, implied in IMPLIED.items() if name in commands)
    base = factory.getbasetemp().parent if "PYTEST_XDIST_WORKER" in os.environ else factory.getbasetemp()
    for name, write in GIVEN.items():
        if not re.search(rf"(?<![\w./-]){re.escape(name)}(?![\w.-])", commands) or first_made(name, commands):
            continue
        if name == "data_shards/mine" and "mine.toml" in commands:
            write = digits
        kept = base / "given" / f"{name}-{write.__name__}".replace("/", "+") / name
        with open(base / "given.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not kept.exists():
                kept.parent.mkdir(parents=True, exist_ok=True)
                write(kept)
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        if kept.is_dir():
            shutil.copytree(kept, place / name)
        else:
            shutil.copy(kept, place / name)


@contextmanager
def hub(place: Path) -> Iterator[dict[str, str]]:
    """Serve a small ViT under the names that pages use, and yield the variables that make commands ask this server."""
    files = place.parent / f"{place.name}.hub"
    downloaded(files)
    names = ("google/vit-base-patch16-224", "timm/vit_small_patch16_224.augreg_in21k_ft_in1k")
    with serving(Hub({key: {file.name: file.read_bytes() for file in files.iterdir()} for key in names})) as at:
        cache = {"HF_HUB_CACHE": str(files / "cache"), "HF_HUB_OFFLINE": "0"}
        yield {"HF_ENDPOINT": at.url, "NO_PROXY": "127.0.0.1", **cache}
