"""Training steps of 64 and 256 ranks: values against timm in one process, and messages that cannot deadlock.

The ranks are threads of one process (`helpers.many_ranks`). Each call waits for its partners, so every step also proves
the order of sends, receives and collectives.
"""

import tomllib
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.pipelining import schedules
from torch.distributed.pipelining.schedules import get_schedule_class

from helpers.converted import converted
from helpers.many_ranks import Turns
from helpers.paths import EXPERIMENTS
from helpers.plans import DUALPIPEV, INTERLEAVED, ZBV, ZERO_BUBBLE, Case
from helpers.ranks import TIMEOUT, RankError, in_forks
from vitpar import Execution, ViTConfig, model_config, parallelize, parse, validate
from vitpar.models.initial import copy_whole_
from vitpar.recipe.sections.training import OptimizerSection
from vitpar.sharded import box_of, local
from vitpar.strategy import Plan
from vitpar.training.optim.optimizer import ShardedOptimizer
from vitpar.training.step import TrainStep

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
LR = 0.5
NARROW = {"image_size": 8, "patch_size": 4, "embed_dim": 64, "num_heads": 16, "depth": 2, "num_classes": 8}


class Step(NamedTuple):
    """A training step in one process. Parameters and gradients are by vitpar's names."""

    images: Any
    targets: Any
    loss: float
    norm: float
    before: dict[str, Any]
    gradients: dict[str, Any]
    after: dict[str, Any]


@cache
def step_of_timm(config: ViTConfig, batch: int) -> Step:
    """Return an SGD step of timm's model with random parameters, whose gradients are clipped to half their norm."""
    from helpers.foreign_models import randomised
    from helpers.oracles import timm

    torch.manual_seed(0)
    sizes = {name: getattr(config, name) for name in ("patch_size", "num_classes", "embed_dim", "depth", "num_heads")}
    model = randomised(timm.models.vision_transformer.VisionTransformer(img_size=config.image_size, **sizes)).double()
    images = torch.randn(batch, 3, config.image_size, config.image_size, dtype=torch.float64)
    targets = torch.randint(config.num_classes, (batch,))
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    loss = F.cross_entropy(model(images), targets)
    loss.backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    norm = torch.cat([gradient.flatten() for gradient in gradients.values()]).norm().item()
    torch.nn.utils.clip_grad_norm_(model.parameters(), norm / 2)
    torch.optim.SGD(model.parameters(), LR).step()
    states = [as_vitpar(state, config) for state in (before, gradients, dict(model.named_parameters()))]
    return Step(images.numpy(), targets.numpy(), loss.item(), norm, *states)


def as_vitpar(state: dict[str, Tensor], config: ViTConfig) -> dict[str, Any]:
    """Return parameters or gradients of timm as arrays, by vitpar's names and in its order of rows."""
    return {name: tensor.detach().numpy() for name, tensor in converted(state, config).items()}


def step_of_ranks(config: ViTConfig, plan: Plan, batch: int, expected: Step) -> dict[str, float]:
    """Return the largest error of loss, norm, gradients and updated parameters over all ranks."""
    errors: dict[str, float] = {}

    def compare(name: str, shard: Tensor, whole: Any) -> None:
        """Note the error of a rank's shard, relative to the largest element of the complete tensor."""
        offsets, shape = box_of(shard)
        part = whole[tuple(slice(start, start + size) for start, size in zip(offsets, shape, strict=True))]
        mine = local(shard.detach()).numpy()
        assert mine.shape == part.shape, name
        error = np.abs(mine - part).max(initial=0.0) / max(1e-3, np.abs(whole).max())
        errors[name] = np.maximum(errors.get(name, 0.0), error).item()  # unlike max(), it keeps NaN

    list_actions_once(get_schedule_class(plan.schedule))

    def rank(number: int) -> float:
        model = parallelize(config, plan, Execution(batch, precision="fp64"), "cpu")
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                copy_whole_(parameter, torch.from_numpy(expected.before[name]))
        model.parameters_changed()
        section = OptimizerSection(name="sgd", weight_decay=0.0)
        optimizer = ShardedOptimizer(model.named_parameters(), section, matrices=config.hidden_matrices)

        def compare_gradients(_: int) -> None:
            for name, parameter in model.named_parameters():
                assert parameter.grad is not None, name
                compare(f"gradient {name}", parameter.grad, expected.gradients[name])

        step = TrainStep(model, optimizer, clip_grad_norm=expected.norm / 2, after_gradients=compare_gradients)
        images = torch.from_numpy(expected.images)[model.image_rows(batch)] if model.takes_images else None
        done = step(1, LR, images, torch.from_numpy(expected.targets))
        for name, parameter in model.named_parameters():
            compare(f"update {name}", parameter, expected.after[name])
        compare("norm", done.norm, np.array(expected.norm))
        return done.loss.item()

    losses = Turns(plan.world_size).run(rank)
    return {"loss": abs(sum(losses) - expected.loss), **errors}


def assert_equals_timm(case: Case) -> None:
    """Check the loss, the norm, and gradient and update of every parameter, on every rank."""
    config = model_config("vit_custom", **{**NARROW, **case.model})
    plan = validate(replace(parse(case.mesh), **case.plan), config, case.batch)
    expected = step_of_timm(config, case.batch)
    (errors,) = in_forks(step_of_ranks, [{}], config, plan, case.batch, expected, seconds=TIMEOUT)
    names = {f"{what} {name}" for name in expected.gradients for what in ("gradient", "update")}
    assert errors.keys() == {"loss", "norm", *names}
    assert not {name: error for name, error in errors.items() if not error < 1e-10}


CASES = (
    Case("tp16xdp4", batch=16),
    Case("pp16xfsdp4", {"schedule": "gpipe", "microbatches": 4}, {"depth": 16}, batch=16),
    Case("tp8xfsdp8+sp", batch=64),
    Case("fsdp4xtp16+2d", batch=16),
    Case("tp64+2.5d@4", batch=16),
    Case("tp64+3d", batch=16),
    # Every mode next to another: each boundary is an exchange among all 64 ranks.
    Case("pp1: embed=dp4xtp16+2d, 0=tp64+3d, 1=tp8xfsdp8+sp, *=dp2xtp32+2.5d@2", batch=64),
    Case("pp8xtp4xdp2", {**INTERLEAVED, "microbatches": 8}, {"depth": 16}, batch=16),
    Case("pp8xtp2xfsdp4", {**ZERO_BUBBLE, "microbatches": 8}, {"depth": 16}, batch=32),
    Case("pp8xtp4xfsdp2+sp", {**ZBV, "microbatches": 8}, {"depth": 16}, batch=64),
    Case("pp4xtp4xdp4", {**DUALPIPEV, "microbatches": 8}, {"depth": 8}, batch=32),
    Case("pp4xtp8xdp8", {"microbatches": 4}, {"depth": 4}, batch=32),  # 256 ranks
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_step_equals_timm(case: Case) -> None:
    assert_equals_timm(case)


@pytest.mark.soak
@pytest.mark.parametrize("mode", ["1d", "2d", "2.5d", "3d"])
def test_step_of_colossalais_64_ranks_equals_timm(mode: str) -> None:
    """Depth, heads and plan are those of the recipe, width and images smaller, micro-batches as many as stages."""
    recipe = tomllib.loads((EXPERIMENTS / f"colossalai_{mode}.toml").read_text())
    published = {name: recipe["model"][name] for name in ("depth", "num_heads", "patch_size")}
    assert published["depth"] == 32
    mesh = recipe["parallel"]["mesh"]
    plan = {"microbatches": parse(mesh).num_stages}
    assert_equals_timm(Case(mesh, plan, {**published, "embed_dim": 128, "image_size": 32}, batch=64))


def list_actions_once(kind: type) -> None:
    """Let all ranks share torch's lists of actions, of which each makes those of all ranks."""

    def once(owner: Any, name: str, arguments: slice) -> None:
        real, made = getattr(owner, name), dict[Any, Any]()

        def shared(*args: Any, **kwargs: Any) -> Any:
            if args[arguments] not in made:
                made[args[arguments]] = real(*args, **kwargs)
            return made[args[arguments]]

        setattr(owner, name, shared)

    if issubclass(kind, schedules.PipelineScheduleMulti):
        once(kind, "_calculate_single_rank_operations", slice(1, 2))  # one for each rank
        once(schedules, "_validate_schedule", slice(0))
        once(schedules, "_add_send_recv", slice(0))


def crossed(rank: int) -> None:
    """Send first on both ranks."""
    dist.send(torch.ones(1), 1 - rank)
    dist.recv(torch.ones(1), 1 - rank)


def swapped(rank: int) -> None:
    """Call two collectives in different orders."""
    dist.broadcast(torch.ones(1), 0) if rank else dist.all_reduce(torch.ones(1))


def batched(rank: int) -> None:
    """Send in a batch what is received alone."""
    other = [dist.P2POp(dist.isend, torch.ones(1), 1), dist.P2POp(dist.irecv, torch.ones(1), 1)]
    dist.recv(torch.ones(1), 0) if rank else dist.batch_isend_irecv(other)


def not_waited_for(rank: int) -> None:
    received = torch.zeros(1)
    if rank:
        work = dist.irecv(received, 0)
        assert not received, "the message arrived before its wait"
        work.wait()
        assert received.item() == 1
    else:
        dist.send(torch.ones(1), 1)
    raise AssertionError("sent and received")


def run_turns(function: Callable[[int], None]) -> None:
    Turns(2).run(function)


@pytest.mark.parametrize(
    ("program", "sentence"),
    [
        (crossed, "deadlock: 1 ranks in send from 0 to 1"),
        (swapped, r"rank 1 calls .*broadcast.* but rank 0 calls .*all_reduce"),
        (batched, "'batch'.*'single'|'single'.*'batch'"),
        (not_waited_for, "sent and received"),
    ],
)
def test_ranks_in_turns_notice(program: Callable[[int], None], sentence: str) -> None:
    with pytest.raises(RankError, match=sentence):
        in_forks(run_turns, [{}], program)
