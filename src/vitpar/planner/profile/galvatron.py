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

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, TypeAdapter

from vitpar.errors import PlannerError
from vitpar.io import read_json
from vitpar.models.config import ModelConfig
from vitpar.models.description import block_name
from vitpar.models.families import config_to_json
from vitpar.planner.cost.elements import layer_elements
from vitpar.planner.profile import profiles
from vitpar.planner.profile.curves import Curve, exact, fit
from vitpar.planner.search.sections import sections_of
from vitpar.records import first_wrong
from vitpar.strategy import parse
from vitpar.strategy.layer import refuse_many_ranks
from vitpar.strategy.validate import unsplittable
from vitpar.text import count, shown

MB = 2**20
SIZES = tuple(MB * n for n in (1, 64, 1024))
NOTHING = 1e-12
"""Seconds for costs that were not measured: a profile needs positive times."""
UNMEASURED = "counted as zero: optimizer, gathering and reducing except communication, workspace"
NUMBER = "([1-9][0-9]{0,8})"
Layer = tuple[dict[int, float], dict[int | Literal["checkpoint"], float]]
"""(seconds of a forward by images, megabytes of activations per image by degree of tp or with checkpointing)."""
Content = TypeVar("Content")
# Products of two of these numbers stay within the limits of a profile.
RATES = TypeAdapter(dict[str, Annotated[float, Field(ge=1e-15, le=1e15)]])
MILLISECONDS = TypeAdapter(dict[str, Annotated[float, Field(ge=-1e15, le=1e15)]])
MEMORY = TypeAdapter(dict[str, Any])
ACTIVATIONS = TypeAdapter(dict[int | Literal["checkpoint"], Annotated[float, Field(ge=0, le=1e15)]])


def import_hardware(folder: Path, nodes: int, devices_per_node: int, memory_bytes: int) -> profiles.Hardware:
    """Return a hardware profile of `nodes` x `devices_per_node` GPUs, whose files are in `folder`.

    memory_bytes: bytes of memory of a GPU.

    Raises PlannerError if files are missing or invalid.
    """
    ranks = nodes * devices_per_node
    refuse_many_ranks(ranks, "the hardware")
    slower = _read(folder, "overlap_coefficient.json", RATES, {}).get("overlap_coe")
    return profiles.Hardware(
        name=folder.resolve().name,
        device="cuda",
        device_name=folder.resolve().name,
        backend="nccl",
        ranks=ranks,
        ranks_per_node=devices_per_node,
        memory_bytes=memory_bytes,
        links=tuple(_links(folder, nodes, devices_per_node)),
        overlap=slower and profiles.Overlap(compute=max(1.0, slower), communication=max(1.0, slower)),
        measured={"by": "Galvatron"},
    )


def _links(folder: Path, nodes: int, per_node: int) -> Iterator[profiles.Link]:
    """Yield the collectives of every profiled group, and the messages of every profiled pipeline degree."""
    ranks, suffix = nodes * per_node, f"{nodes}nodes_{per_node}gpus_per_node.json"
    bandwidths = _read(folder, f"allreduce_bandwidth_{suffix}", RATES)
    times = _read(folder, f"sp_time_{suffix}", RATES, {})

    def timed(operation: str, size: int) -> dict[int, float]:
        """Return the measured seconds among neighbouring ranks, by bytes."""
        found = sorted(_found(f"{operation}_size_{size}_{NUMBER}MB_time", times))
        return {megabytes * MB: milliseconds / 1e3 for (megabytes,), milliseconds in found}

    def link(operation: str, size: int, stride: int, points: dict[int, float]) -> profiles.Link:
        nodes, timings = profiles.spread(size, stride, per_node)[0], exact(points.items())
        return profiles.Link(operation=operation, ranks=size, stride=stride, nodes=nodes, timings=timings)

    for (size, neighbours), bandwidth in _found(f"allreduce_size_{NUMBER}_consec_([01])", bandwidths):
        if 2 <= size <= ranks:
            # Ranks that are not neighbours are as far apart as possible.
            stride = 1 if neighbours else ranks // size
            _, share = profiles.STEPS["all_reduce"](size)
            whole = (neighbours and timed("allreduce", size)) or {n: share * n / (bandwidth * MB * 1e3) for n in SIZES}
            # Galvatron counts an all-gather or a reduce-scatter as half an all-reduce.
            half = {n: seconds / 2 for n, seconds in whole.items()}
            yield link("all_reduce", size, stride, whole)
            yield link("all_gather", size, stride, half)
            yield link("reduce_scatter", size, stride, half)
            yield link("all_to_all", size, stride, (neighbours and timed("all2all", size)) or half)
    for (pp,), bandwidth in _found(f"pp_size_{NUMBER}", _read(folder, f"p2p_bandwidth_{suffix}", RATES)):
        if pp > 1 and ranks % pp == 0:
            yield link("p2p", 2, ranks // pp, {n: n / (bandwidth * MB * 1e3) for n in SIZES})


def _found(pattern: str, figures: dict[str, float]) -> Iterator[tuple[list[int], float]]:
    """Yield the numbers in every key that matches `pattern`, with its figure."""
    for key, figure in figures.items():
        if match := re.fullmatch(pattern, key):
            yield [int(number) for number in match.groups()], figure


def import_model(folder: Path, config: ModelConfig, precision: str) -> profiles.ModelProfile:
    """Return the model profile of `config`, from the computation and memory profiles in `folder`.

    Raises PlannerError if the files are missing, ambiguous, or for another number of tokens.
    """
    blocks, ends = _layers(folder, config)
    saved = [activations for _, activations in blocks.values()]
    policies = {"none": 2, "full": 3} if all("checkpoint" in each for each in saved) else {"none": 2}
    layers, weights = [], []
    for tp in sorted(key for key in saved[0] if key != "checkpoint" and all(key in each for each in saved)):
        tensor = f"tp{tp}"
        strategy = parse(tensor).strategy
        able = {kind: layer for kind, layer in config.kinds.items() if not unsplittable(layer, strategy)}
        if blocks.keys().isdisjoint(able):
            continue
        for policy, times in policies.items():
            for kind, layer in able.items():
                forwards, megabytes = blocks.get(kind) or ends[kind]
                seconds = _split(forwards, tp)
                full = policy == "full" and kind in blocks
                kept = megabytes["checkpoint"] if full else megabytes.get(tp, megabytes[1] / tp)
                profile = profiles.LayerProfile(
                    layer=kind,
                    tensor=tensor,
                    checkpoint=policy,
                    wrapped=False,
                    forward=Curve(timings=exact(seconds.items())),
                    backward=Curve(timings=exact((images, times * each) for images, each in seconds.items())),
                    input_share=0.0 if layer.first else 0.5,
                    saved=profiles.Bytes(fixed=0, per_row=kept * MB),
                    workspace=profiles.Bytes(fixed=0, per_row=0),
                )
                layers += [profile, profile.model_copy(update={"wrapped": True})]
        for kind, layer in able.items():
            size = layer_elements(layer, strategy).compute_numel
            (gather,) = exact([(size, NOTHING)])
            weights.append(profiles.WeightProfile(layer=kind, tensor=tensor, elements=size, gather=gather, reduce=0))
    return profiles.ModelProfile(
        model=config_to_json(config),
        device="cuda",
        device_name=folder.resolve().name,
        precision=precision,
        compiled=False,
        processes=1,
        layers=tuple(layers),
        weights=tuple(weights),
        optimizer=Curve(timings=exact([(MB, NOTHING)])),
        microbatch=0,
        measured={"by": "Galvatron", "unmeasured": UNMEASURED},
    )


def _split(forwards: dict[int, float], tp: int) -> dict[int, float]:
    """Return the times on each of `tp` ranks, which split only the part that grows with the number of images."""
    least = {images: max(seconds, NOTHING) for images, seconds in forwards.items()}
    fixed, _ = fit([*least], [*least.values()])
    return {images: max(NOTHING, fixed + (seconds - fixed) / tp) for images, seconds in least.items()}


def _layers(folder: Path, config: ModelConfig) -> tuple[dict[str, Layer], dict[str, Layer]]:
    """Return what the files in `folder` contain for each kind of blocks, and for each kind of other layers."""
    computed = _read(folder, "computation_profiling_*.json", MILLISECONDS)
    memory = _read(folder, "memory_profiling_*.json", MEMORY)

    def layer(name: str, section: str, tokens: str, share: float = 1.0) -> Layer:
        """Return a share of a layer type. tokens: of an image, those of all types for "other" as in [3136,784]."""
        # Older profiles of one layer type have "other_0".
        found = sorted(_found(f"layertype_{name}(?:_0)?_bsz{NUMBER}_seq{re.escape(tokens)}", computed))
        times = {images: share * (images * each / 1e3) for (images,), each in found if each >= 0}
        key = "activation" if name == "other" else "tp_activation_per_bsz_dict"
        try:
            saved = ACTIVATIONS.validate_python((memory.get(section) or memory[f"{section}_sp"])[tokens][key])
        except (KeyError, TypeError, ValueError):
            saved = {}
        if not times or 1 not in saved:
            raise PlannerError(
                f"the profile in {folder} has no layertype_{name} of {tokens} tokens with times and, for degree 1, "
                "activations: select the profiled model with --model or --set model.…"
            )
        return times, {key: each if key == "checkpoint" else share * each for key, each in saved.items()}

    blocks: dict[str, Layer] = {}
    lengths: list[str] = []
    passing = 0
    for section in sections_of(config).sections:
        last = config.layers[block_name(section.blocks[-1])]
        if last.embeds_ids and last.takes:
            # The tokens before it only pass through the blocks behind: a T5's decoder takes those of both.
            passing = last.takes.tokens
            continue
        lengths.append(str(last.gives.tokens - passing))
        number = str(len(lengths) - 1)
        for block in section.layers:
            if block.is_block:
                # The layer type is the last block. A block that merges patches first has some more to compute.
                share = block.flops / last.flops
                blocks[block.kind] = layer(number, f"layertype_{number}", lengths[-1], share)
    # Galvatron measures everything but its layer types together.
    every = f"[{','.join(lengths)}]" if len(lengths) > 1 else lengths[0]
    (times, embed), (_, head) = (layer("other", f"other_memory_pp_on_{end}", every) for end in ("first", "last"))
    embeds = [kind for kind, each in config.kinds.items() if each.embeds_ids or each.first]
    parts = {images: seconds / (len(embeds) + 1) for images, seconds in times.items()}
    return blocks, {**dict.fromkeys(embeds, (parts, embed)), config.last_layer.kind: (parts, head)}


def _read(folder: Path, pattern: str, kind: TypeAdapter[Content], absent: Content | None = None) -> Content:
    """Return the content of the one file in `folder` that matches `pattern`, or `absent` if none does.

    Raises PlannerError if none does without `absent`, if several do, or if the content is invalid.
    """
    files = sorted(folder.glob(pattern))
    if not files and absent is not None:
        return absent
    if len(files) != 1:
        raise PlannerError(f"{folder} has {count(len(files), 'file')} named {pattern}: use a folder with exactly one")
    try:
        return kind.validate_python(read_json(files[0]))
    except (OSError, ValueError) as error:
        wrong = error.strerror if isinstance(error, OSError) else first_wrong(error)
        raise PlannerError(f"cannot read Galvatron's profile {shown(files[0])}: {wrong}: profile again") from None
