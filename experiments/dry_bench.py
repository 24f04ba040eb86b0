"""Count the work of compiled blocks on a GPU, and estimate steps, on a machine without one.

    make dry-bench                                                                   # B/16, L/16, H/14, g/14 on an H200
    python experiments/dry_bench.py --gpu A100 --models vit_base_patch16_224         # a quarter of a minute
    python experiments/dry_bench.py --variant fp8 --models vit_huge_patch14_224 --json fp8.json
    python experiments/dry_bench.py --set triton.mix_order_reduction=false           # with a setting of the compiler

torch's compiler generates the code of a block, forward and backward, for tensors on a GPU that does not exist. The code
is then run on tensors without memory, so that every kernel is counted as it would start: bytes, FLOPs, shapes. Triton
and its ptxas compile the kernels to machine code, which shows registers and spills.

- A pass is a read or write of one activation of tokens x width. The passes of a block are the bytes of all kernels but
  products and attention, each tensor counted once a kernel.
- The shape of a product is rows x columns x summed elements; of attention, batch x heads x tokens x features.
- Configurations of a Triton kernel are those that a GPU would time to keep the fastest: ranges are over all of them.
- The estimate of a step is a roofline (experiments/bench/dry/roofline.py), with the rates of src/vitpar/clusters. It is
  no measurement: compare with `make bench-gpu`.

Needs a C++ compiler and Triton: pip install --no-deps triton==3.7.1. Exit code 1: a kernel spills registers.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

from bench.dry.work import VARIANTS
from bench.gpu_models import GIB, MODELS, batch_for
from bench.simulated_gpu.gpus import GPUS
from bench.simulated_gpu.library import build, compiler, load
from bench.simulated_gpu.requirements import WITHOUT_TRITON, has_triton

if TYPE_CHECKING:
    from bench.dry.tables import Row


def main() -> int:
    """Read the options, count, print tables and return the exit code."""
    options = arguments()
    with tempfile.TemporaryDirectory() as folder:
        load(build(Path(folder)))  # before anything imports torch
        from bench.simulated_gpu.compiler import prepare

        prepare(GPUS[options.gpu], folder)
        rows = measure(options)
    return show(options, rows)


def arguments() -> argparse.Namespace:
    """Parse and check the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), metavar="NAME", help="timm's names (B, L, H, g)")
    parser.add_argument("--gpu", choices=GPUS, default="H200", help="GPU to generate code for (default H200)")
    parser.add_argument(
        "--batch", type=int, metavar="N", help="images a step (default: as `make bench-gpu` on an H200)"
    )
    parser.add_argument("--variant", choices=VARIANTS, default="plain", help="of the block (default plain)")
    parser.add_argument(
        "--products", type=float, metavar="TFLOPS", help="sustained rate of bf16 products (default: the data sheet's)"
    )
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="setting of torch._inductor")
    parser.add_argument("--no-cubins", action="store_true", help="do not compile Triton kernels to machine code")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all counts there")
    options = parser.parse_args()
    if options.batch is not None and options.batch < 1:
        parser.error(f"--batch is {options.batch}: use 1 or more")
    if options.products is not None and not options.products > 0:
        parser.error(f"--products is {options.products:g}: use a rate above 0")
    if options.variant == "fp8" and GPUS[options.gpu].major < 9:
        parser.error(f"the {options.gpu} cannot multiply in float8: use --gpu H100 or H200, or another --variant")
    if not has_triton():
        parser.error(WITHOUT_TRITON)
    if compiler() is None:
        parser.error("there is no C++ compiler: install g++ or clang++, or name one in CXX")
    return options


def measure(options: argparse.Namespace) -> list[Row]:
    """Count and estimate every model; print progress on stderr."""
    from bench.dry.block import block_work, of_variant
    from bench.dry.roofline import estimate, rates_of
    from bench.dry.tables import Row
    from vitpar.errors import UserError
    from vitpar.models import ViTConfig, model_config

    try:
        configs = [model_config(name) for name in options.models]
        change_settings(options.set)
    except UserError as error:
        sys.exit(f"error: {error}")
    if others := [config.name for config in configs if not isinstance(config, ViTConfig)]:
        sys.exit(f"error: {others[0]} is no Vision Transformer of equal blocks: leave it out")
    rates = rates_of(options.gpu, options.products and 1e12 * options.products)
    rows = []
    for config in (of_variant(config, options.variant) for config in configs):
        begun = time.monotonic()
        batch = options.batch or batch_for(config.name, 140 * GIB)
        work = block_work(config, batch, GPUS[options.gpu], options.variant, cubins=not options.no_cubins)
        precision = "fp8" if options.variant == "fp8" else "bf16"
        rows.append(Row(config, batch, work, estimate(config, batch, work, rates, precision)))
        print(f"{config.name}: counted in {time.monotonic() - begun:.0f} s", file=sys.stderr, flush=True)
    return rows


def change_settings(assignments: list[str]) -> None:
    """Change settings of ``torch._inductor.config``. Raises UserError for a name or value that does not exist.

    assignments: KEY=VALUE pairs, with values as in TOML.
    """
    import torch._inductor.config as settings

    from vitpar.errors import UserError
    from vitpar.text import nearest, shown

    known = settings.get_config_copy()
    for assignment in assignments:
        key, _, text = assignment.partition("=")
        if key not in known:
            raise UserError(f"torch's compiler has no setting '{shown(key)}'{nearest(key, sorted(known))}: use another")
        try:
            setattr(settings, key, tomllib.loads(f"value = {text.lower()}")["value"])
        except tomllib.TOMLDecodeError:
            raise UserError(f"--set {key} is '{shown(text)}': use a value of TOML, such as true or 2") from None


def show(options: argparse.Namespace, rows: list[Row]) -> int:
    """Print the tables, write the JSON file, and return the exit code."""
    from bench.dry import tables
    from bench.json_file import write_json

    facts = header(options)
    for name, value in facts.items():
        print(f"- {name}: {value}")
    print("\n".join(["\n## Work of a block\n", *tables.summary(rows)]))
    print("\n".join(["## Estimated steps\n", *tables.estimates(rows, options.gpu)]))
    for row in rows:
        print("\n".join([f"## Kernels of a block: {row.name}\n", *tables.kernels(row)]))
    spilling = {row.name: row.work.spilling for row in rows if row.work.spilling}
    for name, kernels in spilling.items():
        print(f"- {name}: {', '.join(kernels)} spill registers")
    if options.json:
        write_json(options.json, {"header": facts, "models": [row.to_json() for row in rows]})
    return 1 if spilling else 0


def header(options: argparse.Namespace) -> dict[str, str]:
    """Return what the tables are of: commit, command, versions, and the GPU that does not exist."""
    import triton

    from bench.header import header as of_machine

    facts = of_machine()
    gpu = GPUS[options.gpu]
    simulated = f"{gpu.name}, simulated: sm_{gpu.major}0, {gpu.multi_processor_count} multiprocessors"
    versions = f"{facts['versions']}, Triton {triton.__version__}"
    kept = {name: facts[name] for name in ("date", "commit", "command")}
    return kept | {"GPU": simulated, "variant": options.variant, "versions": versions}


if __name__ == "__main__":
    sys.exit(main())
