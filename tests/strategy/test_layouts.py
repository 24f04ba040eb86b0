"""Token layouts and redistributions between them, by arithmetic and on real ranks in forward and backward."""

from itertools import product

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from helpers.plans import strategies_of
from helpers.ranks import Ranks
from vitpar import model_config
from vitpar.planner.search.space import Space
from vitpar.strategy import Strategy, image_layout, output_layout, parse, token_layout
from vitpar.strategy.layout import Layout, moves, received_share, row_parts, token_layout_key

BATCH, TOKENS, WIDTH = 72, 3, 24
WHOLE = torch.arange(BATCH * TOKENS * WIDTH, dtype=torch.float64).view(BATCH, TOKENS, WIDTH)


def layout(text: str) -> Layout:
    return token_layout(parse(text).strategy)


def part_of(whole: torch.Tensor, at: Layout, rank: int) -> torch.Tensor:
    rows, features = at[rank].row_range(BATCH), at[rank].feature_range(WIDTH)
    return whole[rows.start : rows.stop, :, features.start : features.stop]


@given(st.sampled_from([1, 2, 4, 6, 8, 12]).flatmap(lambda n: st.tuples(strategies_of(n), strategies_of(n))))
def test_moves_send_each_rank_exactly_what_it_lacks(pair: tuple[Strategy, Strategy]) -> None:
    source, target = token_layout(pair[0]), token_layout(pair[1])
    found = moves(source, target, BATCH, WIDTH)
    for rank in range(len(target)):
        taken = torch.zeros(BATCH, WIDTH, dtype=torch.int64)
        for move in (m for m in found if m.receiver == rank):
            rows, features = slice(move.rows.start, move.rows.stop), slice(move.features.start, move.features.stop)
            taken[rows, features] += 1
            held = torch.zeros(BATCH, WIDTH, dtype=torch.bool)
            held[source[move.sender].row_range(BATCH), :] = True
            assert held[rows].all() and set(move.features) <= set(source[move.sender].feature_range(WIDTH))
            owned = set(source[rank].row_range(BATCH)) & set(move.rows)
            if set(source[rank].feature_range(WIDTH)) & set(move.features) and owned and move.sender != rank:
                pytest.fail(f"rank {rank} is sent what it has: {move}")
        wanted = torch.zeros_like(taken)
        rows, features = target[rank].row_range(BATCH), target[rank].feature_range(WIDTH)
        wanted[rows.start : rows.stop, features.start : features.stop] = 1
        assert torch.equal(taken, wanted)
    received = [sum(m.elements for m in found if m.receiver == r != m.sender) for r in range(len(target))]
    assert received_share(source, target) == pytest.approx(max(received) / (BATCH * WIDTH))


@given(strategies_of(8))
def test_equal_layouts_move_nothing(strategy: Strategy) -> None:
    at = token_layout(strategy)
    assert received_share(at, at) == 0
    assert all(move.sender == move.receiver for move in moves(at, at, BATCH, WIDTH))
    assert len({(p.row, p.feature) for p in at}) * len([p for p in at if p == at[0]]) == len(at)
    assert row_parts(strategy) % strategy.data_parallel == 0


def test_image_and_output_layouts() -> None:
    sequence, cube = parse("dp2xtp2+sp").strategy, parse("tp8+3d").strategy
    assert [part.row for part in image_layout(sequence)] == [0, 1, 2, 3]
    assert [part.row for part in output_layout(sequence)] == [0, 0, 1, 1]
    assert {part.features for part in image_layout(cube)} == {part.features for part in output_layout(cube)} == {1}
    assert [part.row for part in output_layout(cube)] == [0, 0, 1, 1, 2, 2, 3, 3]


MESHES = {
    4: ("dp4", "tp4", "dp2xtp2", "tp2xfsdp2", "tp4+2d", "tp4+sp", "tp2xdp2+sp"),
    6: ("dp6", "tp3xdp2", "dp2xtp3", "fsdp3xtp2+sp", "tp6"),
    8: ("fsdp8", "tp8+3d", "tp8+2.5d", "tp4xdp2+2d", "dp2xtp4+sp", "tp2xdp2xfsdp2"),
}


def exchanged(device: torch.device, meshes: tuple[str, ...]) -> list[str]:
    """Return the errors in the redistributions between any two of `meshes`; runs on every rank."""
    from vitpar.parallel.redistribute import Redistribute

    rank, wrong = dist.get_rank(), []
    for source in map(layout, meshes):
        for target in map(layout, meshes):
            x = part_of(WHOLE, source, rank).clone().requires_grad_()
            y = Redistribute(source, target, WIDTH, dist.group.WORLD)(x)
            y.backward(part_of(-WHOLE, target, rank))
            assert x.grad is not None
            if not torch.equal(y, part_of(WHOLE, target, rank)) or not torch.equal(x.grad, -x.detach()):
                wrong.append(f"{source} to {target} on rank {rank}")
            if y._is_view():
                wrong.append("a stage's output must not be a view")
    return wrong


@pytest.mark.parametrize("size", MESHES)
def test_every_redistribution_is_exact_on_real_ranks(size: int, ranks: Ranks) -> None:
    assert [problem for here in ranks(size).run(exchanged, MESHES[size]) for problem in here] == []


@pytest.mark.parametrize("ranks", [8, 12, 16, 64])
def test_layout_keys_are_equal_exactly_if_layouts_are(ranks: int) -> None:
    config = model_config("vit_custom", patch_size=4, embed_dim=96, depth=2, num_heads=12)
    strategies = Space(config, ranks, (ranks,), flags=("sp", "2d", "2.5d", "3d")).strategies(ranks)
    first = {token_layout_key(strategy): strategy for strategy in reversed(strategies)}
    for strategy in strategies:
        assert token_layout(strategy) == token_layout(first[token_layout_key(strategy)]), strategy
    for one, other in product(first.values(), repeat=2):
        assert one == other or token_layout(one) != token_layout(other), (one, other)
