"""Conversion of Galvatron's profiles, from the JSON files of its profilers.

The figures are read as Galvatron reads them: a GB/s is 1000 · 2**20 bytes per second, a forward's milliseconds are per
image of the batch, and a backward takes twice as long. Every profiled batch size is a point of the curve. The line
through these points has a fixed part, which tensor parallelism does not split. Below the smallest profiled batch a
forward takes as long as that one: Galvatron's line through zero would make micro-batches of one image free. Costs that
Galvatron does not measure (optimizer, sharding apart from communication, workspace) are taken as zero, as `measured`
notes. Of a model with several sections of blocks, layer type n is section n: of a Swin a stage, of a T5 the encoder and
the decoder. The layers outside the blocks are measured together, and get equal shares of that time.
Source: https://github.com/PKU-DAIR/Hetu-Galvatron, its hardware and model profilers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitpar.errors import PlannerError
from vitpar.io import read_json
from vitpar.limits import MAX_MEASURE
from vitpar.models.config import ModelConfig
from vitpar.models.description import block_name
from vitpar.models.families import config_to_json
from vitpar.planner.cost.elements import layer_elements
from vitpar.planner.profile.curves import Curve, exact, fit
from vitpar.planner.profile.profiles import (
    STEPS,
    Bytes,
    Hardware,
    LayerKind,
    LayerProfile,
    Link,
    ModelProfile,
    Operation,
    Overlap,
    WeightProfile,
)
from vitpar.planner.search.sections import BlockSection, sections_of
from vitpar.strategy import parse, validate
from vitpar.strategy.layer import refuse_many_ranks
from vitpar.strategy.validate import unsplittable
from vitpar.text import shown

MB = 2**20
SIZES = tuple(MB * n for n in (1, 64, 1024))
LARGEST = math.sqrt(MAX_MEASURE)
"""Largest number accepted in a file, so that products of two stay within MAX_MEASURE."""
NOTHING = 1e-12
"""Seconds for costs that were not measured: a profile needs positive times."""
Forwards = tuple[tuple[int, float], ...]
"""(images, seconds of a forward), by rising images."""
UNMEASURED = "counted as zero: optimizer, gathering and reducing except communication, workspace"


def import_hardware(folder: Path, nodes: int, devices_per_node: int, memory_bytes: int, device_name: str) -> Hardware:
    """Return a hardware profile of `nodes` x `devices_per_node` GPUs, whose files are in `folder`.

    memory_bytes: bytes of memory of a GPU.
    device_name: name of the GPU.

    Raises PlannerError if files are missing or invalid.
    """
    ranks, suffix = nodes * devices_per_node, f"{nodes}nodes_{devices_per_node}gpus_per_node.json"
    refuse_many_ranks(ranks, "the hardware")
    bandwidths = _numbers(_read(folder / f"allreduce_bandwidth_{suffix}"), folder)
    between = _numbers(_read(folder / f"p2p_bandwidth_{suffix}"), folder)
    sized = folder / f"sp_time_{suffix}"
    times = _numbers(_read(sized), folder) if sized.exists() else {}
    collectives = list(_collectives(bandwidths, times, ranks, devices_per_node))
    if not collectives:
        raise PlannerError(
            f"allreduce_bandwidth_{suffix} in {folder} has no allreduce_size_N_consec_0 or _1: use the folder that "
            "Galvatron's hardware profiler wrote"
        )
    coefficient = folder / "overlap_coefficient.json"
    slower = max(1.0, _numbers(_read(coefficient), folder).get("overlap_coe", 1.0)) if coefficient.exists() else None
    return Hardware(
        name=folder.resolve().name,
        device="cuda",
        device_name=device_name,
        backend="nccl",
        ranks=ranks,
        ranks_per_node=devices_per_node,
        threads=1,
        memory_bytes=memory_bytes,
        links=(*collectives, *_sends(between, ranks, devices_per_node)),
        overlap=Overlap(compute=slower, communication=slower) if slower else None,
        measured={"by": "Galvatron"},
    )


def _collectives(
    bandwidths: Mapping[str, float], times: Mapping[str, float], ranks: int, per_node: int
) -> Iterator[Link]:
    """Yield the collectives of every profiled group.

    bandwidths: GB/s of all-reduces, by Galvatron's keys.
    times: milliseconds by size, which replace the bandwidth in groups of neighbouring ranks; may be empty.
    """
    for key, bandwidth in bandwidths.items():
        match = re.fullmatch(r"allreduce_size_([0-9]{1,9})_consec_([01])", key)
        if not match or not 2 <= int(match[1]) <= ranks or not bandwidth:
            continue
        size = int(match[1])
        # consec_1: neighbouring ranks. consec_0: as far apart as possible.
        stride = 1 if match[2] == "1" else ranks // size
        nodes = len({rank * stride // per_node for rank in range(size)})
        _, share = STEPS["all_reduce"](size)
        line = tuple((n, share * n / _rate(bandwidth)) for n in SIZES)
        points = (_sized(times, "allreduce", size) if stride == 1 else ()) or line
        # Galvatron counts an all-gather or a reduce-scatter as half an all-reduce.
        parts: tuple[tuple[Operation, float], ...] = (("all_reduce", 1.0), ("all_gather", 0.5), ("reduce_scatter", 0.5))
        exchange = (_sized(times, "all2all", size) if stride == 1 else ()) or tuple((n, s / 2) for n, s in points)
        for operation, part in parts:
            timings = exact((n, part * seconds) for n, seconds in points)
            yield Link(operation=operation, ranks=size, stride=stride, nodes=nodes, timings=timings)
        yield Link(operation="all_to_all", ranks=size, stride=stride, nodes=nodes, timings=exact(exchange))


def _sends(bandwidths: Mapping[str, float], ranks: int, per_node: int) -> Iterator[Link]:
    """Yield the p2p links between pipeline stages, for every profiled pipeline degree."""
    for key, bandwidth in bandwidths.items():
        match = re.fullmatch(r"pp_size_([0-9]{1,9})", key)
        if match and int(match[1]) > 1 and ranks % int(match[1]) == 0 and bandwidth:
            stride = ranks // int(match[1])
            timings = exact((n, n / _rate(bandwidth)) for n in SIZES)
            yield Link(operation="p2p", ranks=2, stride=stride, nodes=1 + (stride >= per_node), timings=timings)


def import_model(folder: Path, config: ModelConfig, precision: str) -> ModelProfile:
    """Return the model profile of `config`, from the computation and memory profiles in `folder`.

    Raises PlannerError if the files are missing, ambiguous, or for another number of tokens.
    """
    types = list(_layer_types(config))
    every = types[0][1] if len(types) == 1 else f"[{','.join(tokens for _, tokens in types)}]"
    computed = _numbers(_read(_only(folder, "computation_profiling_*.json")), folder)
    memory = _read(_only(folder, "memory_profiling_*.json"))
    blocks = {
        kind: _block(computed, memory, number, tokens, share, folder)
        for number, (section, tokens) in enumerate(types)
        for kind, share in _shares(config, section).items()
    }
    # Galvatron measures everything but its layer types together.
    embeds = [kind for kind, layer in config.kinds.items() if layer.embeds_ids or layer.first]
    outside = _forwards(computed, "other", every, folder)
    ends = tuple((images, seconds / (len(embeds) + 1)) for images, seconds in outside)
    degrees = set.intersection(*({*block.saved} for block in blocks.values()))
    first, last = (
        _activations(_section(memory, f"other_memory_pp_on_{place}", every, folder).get("activation"), folder)
        for place in ("first", "last")
    )
    layers, weights = [], []
    for tp in sorted(degrees):
        tensor = f"tp{tp}"
        strategy = parse(tensor).strategy
        able = [kind for kind, layer in config.kinds.items() if not unsplittable(layer, strategy)]
        if not {*able} & {*blocks}:
            validate(parse(tensor), config, None)  # refuses degrees that do not fit the model
        for policy, times in (("none", 2), ("full", 3)):
            kinds: dict[LayerKind, tuple[Forwards, float | None]] = {
                **dict.fromkeys(embeds, (ends, first.get(tp, first.get(1, 0.0) / tp))),
                **{kind: (block.forwards, block.megabytes(tp, policy)) for kind, block in blocks.items()},
                config.last_layer.kind: (ends, last.get(tp, last.get(1, 0.0) / tp)),
            }
            kinds = {kind: kinds[kind] for kind in able}
            if any(megabytes is None for _, megabytes in kinds.values()):
                continue
            for kind, (forwards, megabytes) in kinds.items():
                split = _split(forwards, tp)
                layer = LayerProfile(
                    layer=kind,
                    tensor=tensor,
                    checkpoint=policy,
                    wrapped=False,
                    forward=Curve(timings=exact(split)),
                    backward=Curve(timings=exact((images, times * seconds) for images, seconds in split)),
                    input_share=0.0 if config.kinds[kind].first else 0.5,
                    saved=Bytes(fixed=0, per_row=(megabytes or 0.0) * MB),
                    workspace=Bytes(fixed=0, per_row=0),
                )
                layers += [layer, layer.model_copy(update={"wrapped": True})]
        for kind in able:
            elements = layer_elements(config.kinds[kind], strategy).compute_numel
            (nothing,) = exact([(elements, NOTHING)])
            weights.append(WeightProfile(layer=kind, tensor=tensor, elements=elements, gather=nothing, reduce=0))
    return ModelProfile(
        model=config_to_json(config),
        device="cuda",
        device_name=folder.resolve().name,
        precision=precision,
        compiled=False,
        processes=1,
        threads=1,
        cores=1,
        layers=tuple(layers),
        weights=tuple(weights),
        optimizer=Curve(timings=exact([(MB, NOTHING)])),
        microbatch=0,
        measured={"by": "Galvatron", "unmeasured": UNMEASURED},
    )


def _layer_types(config: ModelConfig) -> Iterator[tuple[BlockSection, str]]:
    """Yield the sections of blocks that Galvatron profiles, with the tokens of a sample that each computes.

    Behind a block that embeds token ids, the tokens before it only pass through: a T5's decoder takes those of both.
    """
    passing = 0
    for section in sections_of(config).sections:
        block = config.layers[block_name(section.blocks[0])]
        if not block.embeds_ids:
            yield section, str(block.gives.tokens - passing)
        elif block.takes:
            passing = block.takes.tokens


@dataclass(frozen=True)
class _Block:
    """The profile of a kind of blocks."""

    forwards: Forwards
    """Times of a forward."""
    saved: Mapping[int, float]
    """Megabytes of activations per image, by tensor-parallel degree."""
    recomputed: float | None
    """Megabytes of activations per image with checkpointing; None if it was not profiled."""

    def megabytes(self, tp: int, policy: str) -> float | None:
        """Return the megabytes of activations per image; None if they were not profiled."""
        return self.saved[tp] if policy == "none" else self.recomputed


def _block(
    computed: Mapping[str, float], memory: Mapping[str, Any], number: int, tokens: str, share: float, folder: Path
) -> _Block:
    """Return the profile of Galvatron's layer type `number`.

    tokens: tokens of an image.
    share: FLOPs of a block in units of those of the layer type.
    """
    forwards = _forwards(computed, str(number), tokens, folder)
    section = _section(memory, f"layertype_{number}", tokens, folder)
    saved = _activations(section.get("tp_activation_per_bsz_dict"), folder)
    return _Block(
        tuple((n, share * seconds) for n, seconds in forwards),
        {degree: share * megabytes for degree, megabytes in saved.items()},
        _numbers(section["tp_activation_per_bsz_dict"], folder).get("checkpoint"),
    )


def _shares(config: ModelConfig, section: BlockSection) -> dict[LayerKind, float]:
    """Return the FLOPs of a section's kinds of blocks, in units of those of its last block.

    Galvatron profiles one layer type for each section. A block that merges patches first has some more to compute.
    """
    last = config.layers[block_name(section.blocks[-1])]
    blocks = [layer for layer in section.layers if layer.is_block]
    return {layer.kind: layer.flops / last.flops for layer in blocks}


def _sized(times: Mapping[str, float], operation: str, ranks: int) -> tuple[tuple[int, float], ...]:
    """Return the measured (bytes, seconds) of an operation among `ranks` ranks, by rising bytes."""
    pattern = re.compile(rf"{operation}_size_{ranks}_([1-9][0-9]{{0,8}})MB_time")
    matches = ((pattern.fullmatch(key), milliseconds) for key, milliseconds in times.items() if milliseconds)
    return tuple(sorted((int(match[1]) * MB, milliseconds / 1e3) for match, milliseconds in matches if match))


def _rate(bandwidth: float) -> float:
    """Return Galvatron's GB/s in bytes per second."""
    return bandwidth * MB * 1e3


def _forwards(computed: Mapping[str, float], name: str, tokens: str, folder: Path) -> Forwards:
    """Return (images, seconds of their forward) for every profiled batch size.

    name: Galvatron's layer type: "0" and on for blocks, "other" for the rest.
    tokens: tokens of an image, those of all layer types for "other" as in [3136,784].

    Raises PlannerError if no batch was profiled with `tokens` tokens.
    """
    # Older profiles of one layer type have "other_0".
    key = "other(?:_0)?" if name == "other" else name
    pattern = re.compile(rf"layertype_{key}_bsz([1-9][0-9]{{0,8}})_seq([0-9]{{1,9}}|\[[0-9,]{{1,99}}\])")
    matches = [(match, each) for key, each in computed.items() if (match := pattern.fullmatch(key))]
    forwards = {int(match[1]): int(match[1]) * each / 1e3 for match, each in matches if match[2] == tokens}
    if not forwards:
        known = shown(", ".join(sorted({match[2] for match, _ in matches}))) or "none"
        raise PlannerError(
            f"the computation profile in {folder} has no layertype_{name} of {tokens} tokens (it has {known}): select "
            "the profiled model with --model or --set model.…"
        )
    return tuple(sorted(forwards.items()))


def _split(forwards: Forwards, tp: int) -> Forwards:
    """Return the times on each of `tp` ranks, which split only the part that grows with the number of images."""
    least = [max(seconds, NOTHING) for _, seconds in forwards]
    fixed = fit([images for images, _ in forwards], least)[0] if len(forwards) > 1 else 0.0
    return tuple(
        (images, max(NOTHING, fixed + (seconds - fixed) / tp))
        for (images, _), seconds in zip(forwards, least, strict=True)
    )


def _section(memory: Mapping[str, Any], name: str, tokens: str, folder: Path) -> Mapping[str, Any]:
    section = memory.get(name, memory.get(f"{name}_sp"))
    part = section.get(tokens) if isinstance(section, dict) else None
    if not isinstance(part, dict):
        raise PlannerError(
            f"the memory profile in {folder} has no {name} of {tokens} tokens: select the profiled model with "
            "--model or --set model.…"
        )
    return part


def _activations(content: Any, folder: Path) -> dict[int, float]:
    """Return the megabytes of activations per image, by tensor-parallel degree.

    Raises PlannerError without a valid entry for degree 1.
    """
    by_degree = content if isinstance(content, dict) else {}
    known = {int(key): value for key, value in by_degree.items() if re.fullmatch("[0-9]{1,9}", key)}
    if 1 not in known or not all(isinstance(value, int | float) and value >= 0 for value in known.values()):
        raise PlannerError(f"the memory profile in {folder} lacks activations of degree 1: profile the model again")
    refuse_many_ranks(max(known), f"a tensor-parallel degree in the memory profile in {folder}")
    return {degree: _number(str(degree), value, folder) for degree, value in known.items()}


def _only(folder: Path, pattern: str) -> Path:
    files = sorted(folder.glob(pattern))
    if len(files) != 1:
        what = f"{len(files)} files" if files else "no file"
        raise PlannerError(f"{folder} has {what} {pattern}: use a folder with exactly one")
    return files[0]


def _read(path: Path) -> dict[str, Any]:
    try:
        content = read_json(path)
    except OSError as error:
        raise PlannerError(f"cannot read Galvatron's profile {path}: {error.strerror}") from None
    except ValueError as error:
        raise PlannerError(f"{path} is not a Galvatron profile: {shown(error)}") from None
    if not isinstance(content, dict):
        raise PlannerError(f"{path} is not a Galvatron profile: it has no JSON object")
    return content


def _numbers(content: Mapping[str, Any], folder: Path) -> dict[str, float]:
    """Return the values that are numbers above 0, and zeros of layers that take no time."""
    numbers = {key: value for key, value in content.items() if isinstance(value, int | float)}
    return {key: _number(key, value, folder) for key, value in numbers.items() if not value < 0}


def _number(key: str, value: float, folder: Path) -> float:
    """Return `value`, which a file in `folder` has for `key`.

    Raises PlannerError if it is outside 1 / `LARGEST` to `LARGEST` and not 0.
    """
    if value and not 1 / LARGEST <= value <= LARGEST:  # refuses nan too
        raise PlannerError(
            f"{shown(key)} in {folder} is {shown(value)}: give 0, or a number from {1 / LARGEST:g} to {LARGEST:g}"
        )
    return float(value)
