"""Compare data loaders on the same images.

    python experiments/bench_data.py                               # a few minutes; synthetic images
    python experiments/bench_data.py --images PATH/TO/JPEGS        # your own; a few hundred suffice

- loaders: images/s that one core reads, decodes, crops to 224 pixels and batches. Compares vitpar, webdataset and an
  image folder; the latter two decode with Pillow in torch's DataLoader. They take turns; a ratio is the median of the
  ratios of all rounds.
- workers: images/s of all cores: vitpar's threads compared with as many processes. The main thread either waits, or
  runs small torch operations without pause, like one that launches GPU kernels.
- container: samples/s without decoding: vitpar reading in shuffled order, webdataset streaming.
- start: seconds to the first batch, and memory of all processes of the loader.
- scale: an index of the size of ImageNet-1k and -21k, without images: seconds to open it and to look up the batch at
  sample 1,000,000, and the memory this takes. Also the speed of indexing shards.
- cores: images per second of CPU time for images of several sizes, with RandAugment and without, and the cores that a
  GPU needs for models.
- cache: images per second of CPU time with decoded images in memory and without, in the first and second epoch.
  --small FOLDER names a packed data set of images of 32 pixels, such as CIFAR-10.
"""

import argparse
import io
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import simplejpeg
import torch
import webdataset
from PIL import Image
from rich import box
from rich.console import Console
from rich.table import Table

from bench.big_index import own_memory, probe_index, write_index
from bench.header import header
from bench.input_cost import TABLES as INPUT_COST
from bench.loaders import (
    BATCH,
    image_folder,
    photographs,
    plain_webdataset,
    processes,
    random_resized_crop,
    threads,
    vitpar,
)
from vitpar.data import SampleOrder, ShardSet, index, pack

LOADERS = {
    "vitpar": vitpar,
    "webdataset, Pillow, DataLoader": plain_webdataset,
    "image folder, Pillow, DataLoader": image_folder,
}
ROUNDS, SECONDS = 7, 5.0
WARM_UP = 4  # batches
SYNTHETIC = 400


def main() -> int:
    """Read the options, measure, print tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=TABLES, metavar="TABLE", help=", ".join(TABLES))
    parser.add_argument("--images", type=Path, metavar="FOLDER", help="JPEG files, also in folders  [default: made up]")
    parser.add_argument("--small", type=Path, metavar="FOLDER", help="packed images of 32 pixels  [default: made up]")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all that was measured")
    parser.add_argument("--probe", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.probe:
        return probe(*options.probe)
    facts, found = header(), {}
    facts["images"] = "made up" if options.images is None else "real photographs"
    console = Console(width=160, highlight=False)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        sizes = _write(folder, options.images)
        if options.small:
            (folder / "small").symlink_to(options.small.resolve())
        facts["images"] += f", {len(sizes)} of {statistics.fmean(sizes) / 1e3:.0f} kB"
        for name, value in facts.items():
            console.print(f"- {name}: {value}", soft_wrap=True)
        for name in options.only or TABLES:
            with Console(stderr=True).status(f"{name} …"):
                table, found[name] = TABLES[name](folder)
            console.print(f"\n{name}\n")
            console.print(table)
    if options.json:
        options.json.write_text(json.dumps({"header": facts, **found}, indent=1))
    return 0


def _write(folder: Path, images: Path | None) -> list[int]:
    """Write the images as `source`/a/*.jpg, pack them as `packed`, and return their sizes in bytes."""
    (folder / "source" / "a").mkdir(parents=True)
    if images is None:
        found = photographs(SYNTHETIC)
    else:
        files = sorted(path for path in images.rglob("*") if path.suffix.lower() in (".jpg", ".jpeg"))
        found = (path.read_bytes() for path in files)
    sizes = []
    for number, data in enumerate(found):
        (folder / "source" / "a" / f"{number}.jpg").write_bytes(data)
        sizes.append(len(data))
    (folder / "source" / "a" / "last.jpg").write_bytes(
        data
    )  # an extra image: the validation split takes one of every class
    pack(folder / "source", folder / "packed", val_fraction=1e-9, shard_samples=100)
    return sizes


def loaders(folder: Path) -> tuple[Table, Any]:
    """Compare the speed of loaders on one core."""
    sources = {name: folder / ("source" if "folder" in name else "packed") for name in LOADERS}
    rates: dict[str, list[float]] = {
        name: [] for name in (*LOADERS, "bare simplejpeg decode", "bare Pillow decode and crop")
    }
    shards = ShardSet.open(folder / "packed", "train")
    data = [shards.read(i) for i in range(len(shards))]
    for _ in range(ROUNDS):
        for name in LOADERS:
            batches = LOADERS[name](sources[name])
            for _ in range(WARM_UP):
                next(batches)
            rates[name].append(_rate(lambda batches=batches: len(next(batches))))
            batches.close()  # also stops its workers
        for name, work in (
            ("bare simplejpeg decode", simplejpeg.decode_jpeg),
            ("bare Pillow decode and crop", lambda d: random_resized_crop(Image.open(io.BytesIO(d)).convert("RGB"))),
        ):
            places = np.random.default_rng(0)
            rates[name].append(_rate(lambda work=work, places=places: bool([work(data[places.integers(len(data))])])))
    table = Table("", "images/s on one core", "spread", "vitpar beside it", box=box.MARKDOWN)
    ours = statistics.median(rates["vitpar"])
    for name, values in rates.items():
        ratios = [a / b for a, b in zip(rates["vitpar"], values, strict=True)]
        middle = statistics.median(values)
        table.add_row(
            name, f"{middle:.0f}", f"{min(values):.0f} to {max(values):.0f}", f"{statistics.median(ratios):.2f}"
        )
    return table, {"images_per_second": rates, "median": ours}


def workers(folder: Path) -> tuple[Table, Any]:
    """Compare threads with processes, and measure how much they slow down the main thread."""
    kinds = {"threads": threads, "processes": processes}
    x = torch.randn(64, 64)
    mains: dict[str, Callable[[], object]] = {"waits": lambda: time.sleep(0.01), "computes": lambda: torch.add(x, x)}
    alone = {name: _rate(lambda main=main: bool([main()])) for name, main in mains.items()}
    found: dict[str, dict[str, list[tuple[float, float]]]] = {name: {kind: [] for kind in kinds} for name in mains}
    for _ in range(ROUNDS):
        for name, main in mains.items():
            for kind, loader in kinds.items():
                batches = loader(folder / "packed")
                for _ in range(WARM_UP):
                    next(batches)
                images, steps = _rates_beside(main, batches)
                found[name][kind].append((images, steps / alone[name]))
                batches.close()
    table = Table("", "main thread", "images/s on all cores", "spread", "main thread's pace", box=box.MARKDOWN)
    for name, by_kind in found.items():
        for kind, values in by_kind.items():
            rates, paces = zip(*values, strict=True)
            spread = f"{min(rates):.0f} to {max(rates):.0f}"
            table.add_row(kind, name, f"{statistics.median(rates):.0f}", spread, f"{statistics.median(paces):.2f}")
    return table, found


def _rates_beside(main: Callable[[], object], batches: Iterator[torch.Tensor]) -> tuple[float, float]:
    """Call `main` repeatedly while another thread takes batches; return images/s and calls/s."""
    done, calls, over = 0, 0, threading.Event()

    def take() -> None:
        nonlocal done
        while not over.is_set():
            done += len(next(batches))

    taking = threading.Thread(target=take)
    begun = time.perf_counter()
    taking.start()
    while time.perf_counter() - begun < SECONDS:
        main()
        calls += 1
    seconds, images = time.perf_counter() - begun, done
    over.set()
    taking.join()
    return images / seconds, calls / seconds


def _rate(work: Callable[[], int]) -> float:
    """Call `work` for SECONDS and return the sum of its results per second."""
    begun, done = time.perf_counter(), 0
    while time.perf_counter() - begun < SECONDS:
        done += work()
    return done / (time.perf_counter() - begun)


def container(folder: Path) -> tuple[Table, Any]:
    """Compare the speed of reading samples without decoding them."""
    shards = ShardSet.open(folder / "packed", "train")
    order, urls = SampleOrder(0, len(shards)), [str(path) for path in sorted((folder / "packed").glob("train-*.tar"))]

    def ours() -> int:
        samples = order.batch(ours.position, BATCH)[1]
        ours.position += BATCH
        return sum(len(shards.read(int(i))) > 0 for i in samples)

    def streaming() -> int:
        return sum(len(s["jpg"]) > 0 for s in webdataset.WebDataset(urls, shardshuffle=100, empty_check=False))

    ours.position = 0
    rates: dict[str, list[float]] = {"vitpar, shuffled": [], "webdataset, streaming": []}
    for _ in range(ROUNDS):
        rates["vitpar, shuffled"].append(_rate(ours))
        rates["webdataset, streaming"].append(_rate(streaming))
    ratios = [a / b for a, b in zip(*rates.values(), strict=True)]
    table = Table("", "samples/s", "spread", box=box.MARKDOWN)
    for name, values in rates.items():
        table.add_row(name, f"{statistics.median(values):,.0f}", f"{min(values):,.0f} to {max(values):,.0f}")
    table.add_row("ratio", f"{statistics.median(ratios):.1f}", "")
    return table, rates


def start(folder: Path) -> tuple[Table, Any]:
    """Measure the start of each loader in a separate process."""
    found = {}
    table = Table("", "seconds to the first batch", "MB, all its processes", box=box.MARKDOWN)
    for name in LOADERS:
        source = folder / ("source" if "folder" in name else "packed")
        runs = [json.loads(_probed(name, source)) for _ in range(3)]
        found[name] = runs
        seconds, memory = (statistics.median(run[key] for run in runs) for key in ("seconds", "memory"))
        table.add_row(name, f"{seconds:.2f}", f"{memory / 1e6:.0f}")
    return table, found


def _probed(name: str, source: Path) -> str:
    command = [sys.executable, __file__, "--probe", name, str(source)]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def probe(name: str, source: str) -> int:
    """Print JSON: seconds to the first batch of loader `name`, and memory after ten more; or probe an index."""
    if name == "index":
        return probe_index(Path(source))
    begun = time.perf_counter()
    batches = LOADERS[name](Path(source))
    next(batches)
    seconds = time.perf_counter() - begun
    for _ in range(10):
        next(batches)
    print(json.dumps({"seconds": seconds, "memory": own_memory()}))
    sys.stdout.flush()
    os._exit(0)  # the workers of a DataLoader that is stopped between batches may hang


def scale(folder: Path) -> tuple[Table, Any]:
    """Measure indices of the size of ImageNet-1k and -21k, and the speed of indexing."""
    table = Table(
        "samples", "index MB", "seconds to open", "to the batch at 1,000,000", "MB more, not mapped", box=box.MARKDOWN
    )
    found = []
    for samples in (1_281_167, 14_197_122):
        place = folder / f"index-{samples}"
        place.mkdir()
        write_index(place, samples)
        run = json.loads(_probed("index", place))
        found.append({"samples": samples, **run})
        size = (place / "train.index.npy").stat().st_size / 1e6
        table.add_row(
            f"{samples:,}", f"{size:.0f}", f"{run['open']:.2f}", f"{run['batch']:.4f}", f"{run['memory'] / 1e6:.1f}"
        )
    begun = time.perf_counter()
    manifest = index(folder / "packed", splits={"train": "train-*.tar"})
    seconds = time.perf_counter() - begun
    shards = manifest.splits["train"]
    size = sum(shard.bytes for shard in shards.shards)
    table.add_section()
    table.add_row(
        f"index of {shards.samples:,} images",
        f"{shards.samples / seconds:,.0f}/s",
        f"{size / seconds / 1e6:,.0f} MB/s",
        "",
        "",
    )
    found.append({"indexed_per_second": shards.samples / seconds, "bytes_per_second": size / seconds})
    return table, found


TABLES: dict[str, Callable[[Path], tuple[Table, Any]]] = {
    "loaders": loaders,
    "workers": workers,
    "container": container,
    "start": start,
    "scale": scale,
    **INPUT_COST,
}

if __name__ == "__main__":
    sys.exit(main())
