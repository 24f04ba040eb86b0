"""LAMB, LARS, Muon and Adafactor on sharded parameters equal a plain loop over unsharded ones in one process."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from helpers.collectives import Sent
from helpers.optimizer_references import ADAFACTOR, LAMB, LARS, LION, MUON, RATES, VARIANTS, reference, section, shown
from helpers.ranks import RankPool
from helpers.sharded_parameters import (
    LAYERS,
    LAYOUTS,
    MESHES,
    QKV,
    SHAPES,
    STACKED,
    built,
    drawn,
    give_gradients,
    layers_above,
    like,
    modules,
    ranks_of,
    whole,
)
from vitpar.models.layers import LayeredModel
from vitpar.sharded import local
from vitpar.training.optim.norms import WholeNorms
from vitpar.training.optim.optimizer import ShardedOptimizer
from vitpar.training.optim.state_memory import moments
from vitpar.training.recipe import read_recipe


def optimizer_of(root: nn.Module, settings: Mapping[str, Any]) -> ShardedOptimizer:
    named = dict(root.named_parameters())
    hidden = {name: () for name, p in named.items() if name.startswith("blocks.") and p.dim() == 2}
    matrices = {**hidden, **{name: STACKED for name in QKV if name in named}}
    return ShardedOptimizer(named.items(), section(settings), matrices=matrices, layers_above=layers_above)


def trained(device: torch.device, layout: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Return the complete parameters that this rank holds a shard of, after one step per rate in RATES; collective."""
    root = built(layout)
    for name, p in root.named_parameters():
        assert torch.equal(whole(p), drawn("value", name)), name
        given = like(drawn("value", name), p)
        assert not isinstance(p, DTensor) or torch.equal(p.to_local(), given.to_local()), name
    optimizer = optimizer_of(root, settings)
    for step, rate in enumerate(RATES, start=1):
        give_gradients(root, step)
        optimizer.step(rate)
    return {name: whole(p).numpy() for name, p in root.named_parameters()}


NANO = {"model.name": "vit_nano_patch4_16"}
CASES = [(layout, settings) for layout in (*MESHES, *LAYOUTS) for settings in (LAMB, LARS, MUON, ADAFACTOR)]
DECAYING: tuple[dict[str, Any], ...] = tuple(
    {**settings, "layer_decay": 0.5} for settings in (LAMB, LARS, MUON, ADAFACTOR)
)


@pytest.mark.parametrize(
    ("layout", "settings"), [*CASES, *(("tp2xfsdp2", settings) for settings in (*VARIANTS, *DECAYING))], ids=shown
)
def test_sharded_optimizer_matches_one_process(
    layout: str, settings: dict[str, Any], ranks: Callable[[int], RankPool]
) -> None:
    """LAMB and LARS need norms of complete parameters, Adafactor of their rows and columns, and Muon complete matrices.

    Under fsdp3 some ranks have empty shards; their steps must neither hang nor differ.
    """
    expected = reference(settings)
    seen = set()
    for found in ranks(ranks_of(layout)).run(trained, layout, settings):
        seen |= set(found)
        for name, value in found.items():
            torch.testing.assert_close(torch.from_numpy(value), expected[name], atol=1e-11, rtol=1e-11, msg=name)
    assert seen == set(SHAPES)


def norms(device: torch.device, layout: str) -> dict[str, tuple[float, float]]:
    """Return the norms of each complete parameter and of 3 times its gradient, by name; runs on every rank."""
    root = built(layout)
    give_gradients(root, 1)
    named = dict(root.named_parameters())
    values = [local(p.detach()) for p in named.values()], [3 * local(p.grad) for p in named.values()]
    found = WholeNorms(list(named.values()))(*values)
    return dict(zip(named, zip(*found.tolist(), strict=True), strict=True))


@pytest.mark.parametrize("layout", [*MESHES, *LAYOUTS])
def test_norms_count_every_element_once(layout: str, ranks: Callable[[int], RankPool]) -> None:
    """Norms of sharded and replicated parameters equal those of the complete tensors.

    LAMB and LARS use the ratio of two norms, which hides a factor that both norms share.
    """
    for found in ranks(ranks_of(layout)).run(norms, layout):
        for name, pair in found.items():
            expected = drawn("value", name).norm().item(), 3 * drawn("1", name).norm().item()
            assert pair == pytest.approx(expected, rel=1e-12), name


@pytest.mark.parametrize("settings", [LAMB, LARS, MUON, ADAFACTOR, *VARIANTS], ids=shown)
def test_unsharded_optimizer_matches_the_reference_loop(settings: dict[str, Any]) -> None:
    """Parameters without a gradient do not change."""
    root = modules(LAYERS)
    optimizer = optimizer_of(root, settings)
    idle = {"blocks.0.attn.proj.weight", "blocks.1.norm1.weight"}
    for step, rate in enumerate(RATES, start=1):
        give_gradients(root, step)
        for name in idle:
            root.get_parameter(name).grad = None
        assert set(optimizer.gradients()) == set(SHAPES) - idle
        optimizer.step(rate)
        assert all(p.grad is None for p in root.parameters())
    optimizer.step(0.1)  # without any gradient
    for name, value in reference(settings).items():
        expected = drawn("value", name) if name in idle else value
        torch.testing.assert_close(root.get_parameter(name).detach(), expected, atol=1e-11, rtol=1e-11, msg=name)


@pytest.mark.parametrize("settings", [LION, LAMB, LARS, MUON, ADAFACTOR], ids=shown)
def test_weight_decay_can_be_set_between_steps(settings: dict[str, Any]) -> None:
    """It reaches the parameters that decay, also after 0, and no others."""
    found = []
    for first, later in ((0.3, ()), (0.0, (0.3,))):
        root = modules(LAYERS)
        optimizer = optimizer_of(root, {**settings, "weight_decay": first})
        for decay in later:
            optimizer.set_weight_decay(decay)
        for step, rate in enumerate(RATES, start=1):
            give_gradients(root, step)
            optimizer.step(rate)
        found.append(dict(root.named_parameters()))
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())


# communication


def sent(device: torch.device, layout: str, settings: dict[str, Any]) -> tuple[dict[str, int], int]:
    """Return the collectives of one optimizer step and this rank's number of block matrices; runs on every rank."""
    root = built(layout)
    optimizer = optimizer_of(root, settings)
    give_gradients(root, 1)
    with Sent() as counted:
        optimizer.step(0.1)
    return dict(counted.counts), sum(n.startswith("blocks.") and p.dim() == 2 for n, p in root.named_parameters())


@pytest.mark.parametrize(
    ("layout", "messages"),
    [("fsdp2", 1), ("pp2xfsdp2", 1), ("dp2xfsdp2", 1), ("tp2", 1), ("tp2xfsdp2", 2), ("two tensor axes", 2)],
)
@pytest.mark.parametrize("settings", [LAMB, LARS, *DECAYING[:2]], ids=shown)
def test_norms_take_one_all_reduce_per_process_group(
    layout: str, messages: int, settings: dict[str, Any], ranks: Callable[[int], RankPool]
) -> None:
    """One message per parameter would cost latency in every step."""
    for counts, _ in ranks(ranks_of(layout)).run(sent, layout, settings):
        assert counts == {"all_reduce": messages}


@pytest.mark.parametrize("layout", ["fsdp2", "tp2"])
def test_adafactor_takes_three_all_reduces_per_process_group(layout: str, ranks: Callable[[int], RankPool]) -> None:
    for counts, _ in ranks(2).run(sent, layout, DECAYING[3]):
        assert counts == {"all_reduce": 3}


def test_muon_all_gathers_each_matrix_once(ranks: Callable[[int], RankPool]) -> None:
    """Eight matrices lie in blocks; the classifier and vectors use AdamW and are not gathered."""
    for counts, matrices in ranks(2).run(sent, "fsdp2", MUON):
        assert counts == {"all_gather": matrices} and matrices == 8


# unsharded parameters


@pytest.mark.parametrize("settings", [LAMB, LARS], ids=shown)
def test_zero_norm_disables_the_trust_ratio(settings: dict[str, Any]) -> None:
    """A ratio with a zero norm would freeze the parameter or divide by zero."""
    p = nn.Parameter(torch.zeros(2, 2, dtype=torch.float64))
    optimizer = ShardedOptimizer([("head.fc.weight", p)], section(settings))
    p.grad = torch.ones_like(p)
    optimizer.step(0.1)
    torch.testing.assert_close(p.detach(), torch.full_like(p, -0.1), atol=1e-6, rtol=0)
    p = nn.Parameter(torch.ones(2, 2, dtype=torch.float64))
    optimizer = ShardedOptimizer([("head.fc.weight", p)], section({**settings, "weight_decay": 0.0}))
    p.grad = torch.zeros_like(p)
    optimizer.step(0.1)
    assert torch.equal(p, torch.ones_like(p))


@pytest.mark.parametrize("name", ["adamw", "adam", "sgd", "lion", "lamb", "lars", "adafactor"])
def test_estimate_counts_the_numbers_of_the_state(name: str) -> None:
    """Adafactor keeps a number for each row and column, also of positions and patches, and one for each of a vector."""
    frozen = {"train.freeze": "embed, 0, *.fc1.weight"} if name == "adafactor" else {}
    recipe = read_recipe(None, {"data.path": "x", "train.steps": 1, "optimizer.name": name, **NANO, **frozen})
    config = recipe.config(10)
    parameters = dict(LayeredModel(config).named_parameters())
    for one, p in parameters.items():
        p.requires_grad_(one not in recipe.frozen(config))
    optimizer = ShardedOptimizer(parameters.items(), recipe.optimizer)
    optimizer.allocate()
    kept = sum(value.numel() for key, value in optimizer.state().items() if not key.startswith("step."))
    assert kept / sum(p.numel() for p in parameters.values() if p.requires_grad) == moments(recipe, config)


@pytest.mark.parametrize(
    ("settings", "matrix", "other"),
    [
        (LION, {"exp_avg"}, {"exp_avg"}),
        (LAMB, {"step", "exp_avg", "exp_avg_sq"}, {"step", "exp_avg", "exp_avg_sq"}),
        (LARS, {"momentum_buffer"}, {"momentum_buffer"}),
        ({**LARS, "momentum": 0.0}, set(), set()),
        (MUON, {"momentum_buffer"}, {"step", "exp_avg", "exp_avg_sq"}),
    ],
    ids=lambda value: shown(value) if isinstance(value, dict) else "",
)
def test_optimizer_state_has_the_shape_of_the_local_shard(
    settings: dict[str, Any], matrix: set[str], other: set[str]
) -> None:
    pairs = [("blocks.0.mlp.fc1.weight", nn.Parameter(torch.ones(3, 2))), ("head.fc.weight", nn.Linear(2, 2).weight)]
    optimizer = ShardedOptimizer(pairs, section(settings), matrices={pairs[0][0]: ()})
    for _, p in pairs:
        p.grad = torch.ones_like(p)
    optimizer.step(0.1)
    shards = [p for group in optimizer.torch_optimizer.param_groups for p in group["params"]]
    states = [optimizer.torch_optimizer.state[shard] for shard in shards]
    assert [set(state) for state in states] == [matrix, other]
    for shard, state in zip(shards, states, strict=True):
        assert all(key == "step" or value.shape == shard.shape for key, value in state.items())
