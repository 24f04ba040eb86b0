"""Division of a checkpoint among the ranks that write it, compared with torch.distributed.checkpoint (DCP)."""

import random

import pytest
import torch
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from vitpar.checkpoint.sharing import Held, divide, held


def random_parts(seed: int, world: int, most: int) -> list[list[Held]]:
    """Return what ranks hold: tensors cut along dim 0 into at most `most` parts, each part on one or more ranks."""
    draw = random.Random(seed)
    everyone: list[list[Held]] = [[] for _ in range(world)]
    for number in range(60):
        dtype, width = draw.choice(["float32", "bfloat16", "int64"]), draw.randint(1, 50)
        pieces = draw.choice([count for count in (1, 2, 4, 8) if count <= min(world, most)])
        for rank in range(world):
            part = rank * pieces // world
            first = rank == 0 or (rank - 1) * pieces // world != part
            if first or draw.random() < 0.5:  # at least one of the ranks that may hold the part does
                everyone[rank].append((f"t{number}", dtype, (3 * pieces, width), (3 * part, 0), (3, width)))
    return everyone


def item(part: Held) -> WriteItem:
    name, dtype, shape, offsets, sizes = part
    begin = torch.Size(offsets)
    data = TensorWriteData(
        chunk=ChunkStorageMetadata(begin, torch.Size(sizes)),
        properties=TensorProperties(dtype=getattr(torch, dtype)),
        size=torch.Size(shape),
    )
    return WriteItem(MetadataIndex(name, begin), WriteItemType.SHARD, tensor_data=data)


@pytest.mark.parametrize("most", [1, 8])
@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_parts_are_divided_as_in_dcp(world: int, most: int) -> None:
    for seed in range(5):
        everyone = random_parts(seed, world, most)
        planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner({}, is_coordinator=True)
        plans, metadata = planner.create_global_plan([SavePlan([item(part) for part in mine]) for mine in everyone])
        names, stored = divide(everyone)
        if most == 1:  # DCP counts the bytes of the complete tensor for each of its parts, which changes its balance
            assert [sorted(mine) for mine in names] == [sorted(i.index.fqn for i in plan.items) for plan in plans]
        writing = [rank for rank, mine in enumerate(names) if mine]
        assert stored.keys() == metadata.state_dict_metadata.keys()
        for name, tensor in stored.items():
            chunks = {tuple(chunk.offsets): tuple(chunk.sizes) for chunk in metadata.state_dict_metadata[name].chunks}
            assert {offsets: sizes for _, offsets, sizes in tensor.parts} == chunks
            for shard, offsets, sizes in tensor.parts:
                assert (name, tensor.dtype, tensor.shape, offsets, sizes) in everyone[writing[shard]]


def test_replicated_tensors_are_balanced_by_bytes_and_parts_must_fill_them() -> None:
    everyone: list[list[Held]] = [[(f"t{n}", "float32", (n + 1,), (0,), (n + 1,)) for n in range(100)]] * 4
    names, _ = divide(everyone)
    loads = [sum(4 * (int(name[1:]) + 1) for name in mine) for mine in names]
    assert sum(loads) == 4 * 5050 and max(loads) - min(loads) <= 400
    everyone = [[("t", "float32", (4,), (0,), (3,))], [("t", "float32", (4,), (2,), (2,))]]
    with pytest.raises(AssertionError, match="the parts of t fill it"):
        divide(everyone)
    tensors = {"a": torch.zeros(2, 3, dtype=torch.bfloat16), "scalar": torch.tensor(1.0)}
    assert held(tensors) == [("a", "bfloat16", (2, 3), (0, 0), (2, 3)), ("scalar", "float32", (), (), ())]
