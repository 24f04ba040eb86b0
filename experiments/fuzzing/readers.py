"""Readers of untrusted input, and the small valid files that their cases are made from."""

import json
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from dataclasses import asdict
from itertools import islice, takewhile
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow
import pyarrow.parquet
import torch
import torch.distributed as dist

from helpers.archives import cifar_files, tar, write_imagenet
from helpers.foreign_weights import TIMM_CONFIG, as_transformers, saved, timm_state, transformers_config
from helpers.galvatron_2022 import vit_huge_32, write_profiles
from helpers.hostile_files import message_problem
from helpers.paths import ROOT
from helpers.run_folders import eval_row, event, start, train_row, write_run
from helpers.streamed_shards import answering, write_shards
from helpers.tiny_images import encoded, write_tree, write_zips
from vitpar.checkpoint.folder import Checkpoint, Facts
from vitpar.checkpoint.index import CONFIG, PLAN, RECIPE, STATE
from vitpar.checkpoint.reader import read_whole
from vitpar.checkpoint.writer import Writer
from vitpar.data.images import decode
from vitpar.data.shards.index import Labels, index
from vitpar.data.shards.pack import pack
from vitpar.data.shards.shard_set import ShardSet
from vitpar.data.shards.verify import verify
from vitpar.data.sources import open_source
from vitpar.data.stream import urls
from vitpar.data.stream.loader import StreamLoader
from vitpar.data.stream.stream_set import StreamSet
from vitpar.data.transforms.sample import EvalTransform
from vitpar.errors import UserError
from vitpar.models import model_config
from vitpar.models.layers import LayeredModel
from vitpar.planner.profile import cluster, estimate, galvatron, profiles
from vitpar.recipe.file import DEFAULT_RECIPE, read_recipe
from vitpar.runs import folder, page
from vitpar.strategy import Plan, parse, validate
from vitpar.strategy.plan_json import plan_from_json, plan_text, read_plan
from vitpar.weights.folder import open_weights
from vitpar.weights.importing import import_weights

TINY = model_config("vit_custom", image_size=8, patch_size=4, embed_dim=8, depth=1, num_heads=2, num_classes=3)


class Wrong(Exception):
    """A reader accepted what it must refuse, or did something forbidden."""


class Reader(NamedTuple):
    """Reader of one kind of untrusted input."""

    make: Callable[[Path], object]
    """Function that writes small valid inputs, each into a new folder below the given one."""
    read: Callable[[Path], Any]
    """Function that reads a folder as vitpar does."""
    protected: bool = False
    """Whether it returns values that checksums protect, so that each must be one of a valid input."""


def expect(right: bool, words: str) -> None:
    if not right:
        raise Wrong(words)


def tolerated(call: Callable[..., Any], *arguments: Any) -> Any:
    """Return the result of a use of an accepted input, None if it raises a good UserError."""
    try:
        return call(*arguments)
    except UserError as error:
        expect(message_problem(error) is None, f"{message_problem(error)}: {error!r:.2000}")
        return None


def write_files(folder: Path, files: Mapping[str, bytes | str]) -> None:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)


def each(name: str, contents: Iterable[bytes | str]) -> Callable[[Path], None]:
    """Return the function that writes one file `name` for each of the contents."""
    return lambda home: [write_files(home / f"{n}", {name: content}) for n, content in enumerate(contents)] and None


def read_all(folder: Path) -> list[tuple[bytes, int]]:
    """Return the images that can be read, with their labels; verify must name the others."""
    found, damaged = [], {(problem.split, problem.sample) for problem in verify(folder, workers=1)}
    for split in ("train", "val"):
        shards = ShardSet.open(folder, split)
        for i in range(len(shards)):
            if image := tolerated(shards.read, i):
                found.append((image, shards.label(i)))
            else:
                expect((split, i) in damaged, "verify is silent on an image that cannot be read")
    return found


def make_shards(home: Path) -> None:
    for split in ("train", "val"):
        write_shards(home / "0", split, (3,))


def read_stream(shards: Iterable[object]) -> None:
    urls._SILENT_S = 2.0
    data = StreamSet(tuple(map(str, shards)), samples=6, num_classes=3, labels=Labels(), shuffle_buffer=4)
    with closing(iter(StreamLoader(data, EvalTransform(8), batch_size=4, workers=0))) as batches:
        for batch in islice(takewhile(lambda batch: not batch.ended, batches), 50):
            expect(int(batch.labels.max()) < 3, "a label is outside the classes")


def read_shards(place: Path) -> None:
    tolerated(read_stream, sorted(place.iterdir()))
    index(place, workers=1)
    read_all(place)


def make_answers(home: Path) -> None:
    make_shards(home.parent / "source")
    shard = (home.parent / "source" / "0" / "train-0.tar").read_bytes()
    chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(shard), shard)
    each("answer", [b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(shard), shard), chunked])(home)


def read_answer(place: Path) -> None:
    with answering((place / "answer").read_bytes()) as address:
        read_stream([f"{address}/x.tar"])


def make_packed(home: Path) -> None:
    write_tree(home.parent / "source", 4, 2)
    pack(home.parent / "source", home / "packed", shard_samples=5, workers=1)


def read_source(place: Path) -> list[bytes]:
    """Return images of all splits of a data set in any layout."""
    listed = [path for path in sorted(place.iterdir()) if path.name in ("list.csv", "cifar.tar.gz")]
    source = open_source(listed[0] if listed else place)
    for split in source.splits.values():
        expect(all(0 <= label < len(source.classes) for label in split.labels), "a label is outside the classes")
    return [split.read(i) for split in source.splits.values() for i in range(len(split.labels))]


def make_parquet(home: Path) -> None:
    table = pyarrow.table({"image": [{"bytes": encoded(i), "path": None} for i in range(4)], "label": [0, 1, 2, 0]})
    for kind in ("zstd", "none"):
        (home / kind / "data").mkdir(parents=True)
        pyarrow.parquet.write_table(table, home / kind / "data" / "train.parquet", compression=kind, row_group_size=2)


def make_lists(home: Path) -> None:
    write_tree(home / "folder", 2, 1)
    rows = "path,label,split\na.png,x,train\nb.png,y,train\na.png,y,val\n"
    write_files(home / "list", {"a.png": encoded(0), "b.png": encoded(1), "list.csv": rows})


def make_cifar(home: Path) -> None:
    for name, files in {f"{i}": cifar_files(i > 1, i % 2, count=2)[0] for i in range(4)}.items():
        write_files(home / name, files)
        archive = tar(((f"cifar/{name}", body) for name, body in files.items()), "w:gz")
        write_files(home / f"archive {name}", {"cifar.tar.gz": archive})


def make_checkpoint(home: Path) -> None:
    tensors = {f"model.{name}": torch.ones(value.shape) for name, value in LayeredModel(TINY).named_parameters()}
    facts = Facts(step=5, samples=40, data="abc").model_dump_json()
    texts = {
        STATE: facts,
        RECIPE: DEFAULT_RECIPE.read_text(),
        PLAN: plan_text(Plan()),
        CONFIG: json.dumps(asdict(TINY)),
    }
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    writer = Writer()
    writer.begin(home / "step_5", tensors, texts)
    writer.finish()
    dist.destroy_process_group()


def read_checkpoint(place: Path) -> list[tuple[str, bytes]]:
    found = Checkpoint.open(place)
    tensors = {name: tolerated(read_whole, found, name) for name in [*found.index.tensors][:99]}
    if weights := tolerated(open_weights, place):
        tolerated(weights.read, "head.fc.bias")
    if damage := found.damage():
        raise UserError(damage)
    return [(name, tensor.numpy().tobytes()) for name, tensor in tensors.items() if tensor is not None]


def make_weights(home: Path) -> None:
    state = timm_state()
    saved(home / "timm", state, TIMM_CONFIG)
    saved(home / "transformers", as_transformers(state), transformers_config())
    for kind in ("zip", "old"):
        write_files(home / kind, {"config.json": json.dumps(TIMM_CONFIG)})
        torch.save({"model": state}, home / kind / "pytorch_model.bin", _use_new_zipfile_serialization=kind == "zip")


def read_weights(place: Path) -> None:
    config = import_weights(place, place / "out").config
    expect(open_weights(place / "out").config == config, "the imported configuration reads as another")


def read_toml(place: Path) -> None:
    found = read_recipe(place / "recipe.toml")
    (place / "again.toml").write_text(found.to_toml(), encoding="utf-8")
    expect(tolerated(read_recipe, place / "again.toml") == found, "the recipe that it writes is read as another")
    tolerated(lambda: (found.plan(found.config(10)), found.requested_plans(), found.learning_rate(1_000)(1)))


def make_plans(home: Path) -> None:
    for number, strategy in enumerate(STRATEGIES):
        write_files(home / f"{number}", {"strategy": strategy})
        write_files(home / f"{number} json", {"plan.json": plan_text(parse(strategy))})


def read_plan_or_strategy(place: Path) -> None:
    text = place / "strategy"
    plan = parse(text.read_text("utf-8", "surrogateescape")) if text.exists() else read_plan(place / "plan.json")
    expect(plan_from_json(json.loads(plan_text(plan))) == plan, f"{plan!s:.200} comes back from JSON as another plan")
    expect(tolerated(parse, str(plan)) is not None, f"{plan!s:.200} cannot be read again")
    if valid := tolerated(validate, plan, model_config("vit_small_patch16_224"), 64):
        tolerated(valid.resolve, 8)


def make_profiles(home: Path) -> None:
    hardware = cluster.find_cluster("2xH100").hardware()
    write_files(home / "0", {"cluster.toml": (ROOT / "src/vitpar/clusters/H100.toml").read_bytes()})
    hardware.save(home / "0" / "hardware.json")
    estimate.estimate_model(TINY, "bf16", hardware, ("tp1", "tp2")).save(home / "0" / "model.json")
    write_profiles(home / "0")


def read_profiles(place: Path) -> None:
    tolerated(lambda: cluster.find_cluster(str(place / "cluster.toml")).hardware())
    tolerated(profiles.Hardware.read, place / "hardware.json")
    tolerated(profiles.ModelProfile.read, place / "model.json")
    tolerated(galvatron.import_hardware, place, 1, 8, 80 << 30)
    galvatron.import_model(place, vit_huge_32(), "fp32")


def make_runs(home: Path) -> None:
    for mesh in ("pp2xtp2", "fsdp4"):
        events = [start(mesh, 4), event("warning", text="the learning rate is large"), start(mesh, 4, 2)]
        write_run(home / mesh, [*map(train_row, range(1, 5)), eval_row(4)], mesh=mesh, events=events, steps=4)


def read_run(place: Path) -> None:
    folder.refuse_other_folders(place)
    html = page.report([folder.RunRecord(place), folder.RunRecord(place)])
    expect(html.count("<script") == 3 and "<img" not in html, "a text of the run became an element of the page")
    list(map(folder.summary, folder.runs_in(place)))


STRATEGIES = ("pp2xtp2xdp2", "tp2xdp", "dp2xfsdp4+ckpt", "pp1: 0-7=dp8, 8-11=fsdp8", "tp4+2.5d@1", "pp4xdp2+zero1")
RECIPES = [DEFAULT_RECIPE.read_text(), *(path.read_text() for path in (ROOT / "experiments").glob("*_mini.toml"))]
IMAGES = [encoded(1, kind, (16, 16)) for kind in ("PNG", "JPEG", "GIF", "BMP", "WEBP", "TIFF")]
READERS = {
    "image": Reader(each("image", IMAGES), lambda place: decode((place / "image").read_bytes())),
    "shards": Reader(make_shards, read_shards),
    "http": Reader(make_answers, read_answer),
    "packed": Reader(make_packed, read_all, True),
    "parquet": Reader(make_parquet, read_source),
    "zip": Reader(lambda home: write_zips(home / "0"), read_source, True),
    "list": Reader(make_lists, read_source),
    "cifar": Reader(make_cifar, read_source),
    "imagenet": Reader(lambda home: write_imagenet(home / "0", 2), read_source),
    "checkpoint": Reader(make_checkpoint, read_checkpoint, True),
    "weights": Reader(make_weights, read_weights),
    "recipe": Reader(each("recipe.toml", RECIPES), read_toml),
    "plan": Reader(make_plans, read_plan_or_strategy),
    "profile": Reader(make_profiles, read_profiles),
    "run": Reader(make_runs, read_run),
}
