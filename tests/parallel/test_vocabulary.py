"""Token logits, complete and split by vocabulary: losses and hits compared with torch's, and refused plans."""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from helpers.ranks import Ranks
from helpers.text_models import TextModel, TokenLoss, bert, sample, t5
from vitpar import parse, validate
from vitpar.errors import ModelError, StrategyError
from vitpar.models import IGNORED
from vitpar.models.initial import initialise
from vitpar.models.layers import LayeredModel
from vitpar.models.roles import chunk_range
from vitpar.parallel import parallelize, vocabulary
from vitpar.parallel.vocabulary import VocabularyPart, complete_logits, first_hits, token_losses
from vitpar.strategy import Execution

SHAPE = 3, 5, 23
"""Samples, tokens, ids. Parts of 2 ranks have 12 and 11 ids, those of 4 ranks 6, 6, 6 and 5."""


def logits_and_targets(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Return logits of very different sizes, and targets, of which some are IGNORED."""
    draws = torch.Generator().manual_seed(0)
    logits = torch.randn(SHAPE, generator=draws, dtype=torch.float64) * torch.logspace(-1, 2, 5)[:, None]
    targets = torch.randint(SHAPE[2], SHAPE[:2], generator=draws)
    targets[0, 1] = targets[2, 4] = IGNORED
    targets[1, :2] = torch.tensor([0, SHAPE[2] - 1])
    return logits.to(dtype).requires_grad_(), targets


def expected_losses(logits: Tensor, targets: Tensor) -> Tensor:
    losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="none")
    return losses.view_as(targets)


FACTORS = torch.linspace(0.5, 2, 15).view(3, 5)
"""Weights of the losses of tokens."""


@pytest.mark.parametrize("chunk", [1, 2 * 23, 2**23])
def test_losses_are_torchs(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vocabulary, "LOSS_CHUNK", chunk)
    logits, targets = logits_and_targets()
    losses = token_losses(logits, targets)
    torch.testing.assert_close(losses, expected_losses(logits, targets), rtol=1e-13, atol=1e-13)
    assert losses[0, 1] == losses[2, 4] == 0.0 and losses.dtype is torch.float64
    (ours,) = torch.autograd.grad((losses * FACTORS).sum(), logits)
    (theirs,) = torch.autograd.grad((expected_losses(logits, targets) * FACTORS).sum(), logits)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)
    small = (logits.detach()[:, :2] / 10).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: token_losses(x, targets[:, :2]), small)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_losses_of_narrow_logits_are_accurate(dtype: torch.dtype) -> None:
    logits, targets = logits_and_targets(dtype)
    exact = logits.detach().double().requires_grad_()
    losses, right = token_losses(logits, targets), expected_losses(exact, targets)
    assert losses.dtype is torch.float32
    torch.testing.assert_close(losses.double(), right, rtol=1e-6, atol=1e-6)
    losses.sum().backward()
    right.sum().backward()
    assert logits.grad is not None and logits.grad.dtype is dtype and exact.grad is not None
    # One rounding, also of what is close to 0: probability 1 minus 1.
    eps, least = torch.finfo(dtype).eps, max(1e-6, torch.finfo(dtype).smallest_normal)
    torch.testing.assert_close(logits.grad.double(), exact.grad, rtol=max(eps, 1e-4), atol=least)


class Largest(TorchDispatchMode):
    """Finder of the most elements of a float32 tensor that an operation gives."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.dtype is torch.float32:
            self.elements = max(self.elements, out.numel())
        return out


def test_logits_are_kept_in_16_bits_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vocabulary, "LOSS_CHUNK", 2 * 23)
    logits, targets = logits_and_targets(torch.bfloat16)
    kept: dict[int, Tensor] = {}
    with Largest() as largest:
        with saved_tensors_hooks(lambda x: kept.setdefault(x.untyped_storage().data_ptr(), x), lambda x: x):
            loss = token_losses(logits, targets).sum()
        loss.backward()
    assert largest.elements == 2 * 23
    assert sum(x.nbytes for x in kept.values()) <= logits.nbytes + logits.shape[:2].numel() * (4 + 8 + 1 + 1)


def split(device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Return errors of what ranks compute from parts; runs on every rank."""
    assert dist.group.WORLD is not None
    logits, targets = logits_and_targets(dtype)
    size, rank = dist.get_world_size(), dist.get_rank()
    ids = chunk_range(SHAPE[2], size, rank)
    part, here = VocabularyPart(ids.start, dist.group.WORLD), slice(ids.start, ids.stop)
    mine = logits.detach()[..., here].clone().requires_grad_()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vocabulary, "LOSS_CHUNK", 3 * 12)
        losses, whole = token_losses(mine, targets, part), token_losses(logits, targets)
        (losses * FACTORS).sum().backward()
        (whole * FACTORS).sum().backward()
    assert mine.grad is not None and logits.grad is not None
    tied = torch.zeros(SHAPE)
    tied[..., 3] = tied[..., -1] = 1.0
    ties = first_hits(tied[..., here], torch.full(SHAPE[:2], 3), part)
    late = first_hits(tied[..., here], torch.full(SHAPE[:2], SHAPE[2] - 1), part)
    best = torch.where(targets % 2 == 0, logits.detach().argmax(-1), targets)
    return {
        "losses": (losses - whole).abs().max().item(),
        "gradient": (mine.grad - logits.grad[..., here]).abs().max().item(),
        "hits": torch.equal(first_hits(mine.detach(), best, part), first_hits(logits.detach(), best)),
        "number": int(first_hits(mine.detach(), best, part).sum()),
        "ties": bool(ties.all()) and not late.any(),
        "complete": torch.equal(complete_logits(mine.detach(), SHAPE[2], part), logits.detach()),
    }


@pytest.mark.parametrize(("ranks_", "dtype"), [(2, torch.float64), (4, torch.float64), (2, torch.bfloat16)])
def test_parts_give_the_losses_and_hits_of_complete_logits(ranks_: int, dtype: torch.dtype, ranks: Ranks) -> None:
    for found in ranks(ranks_).run(split, dtype):
        limit = 1e-13 if dtype is torch.float64 else 1e-2
        assert found["losses"] <= 1e-13 * (1 if dtype is torch.float64 else 1e9), found
        assert found["gradient"] <= limit, found
        assert found["hits"] and found["ties"] and found["complete"] and 0 < found["number"] < math.prod(SHAPE[:2])


BATCH = 8


def plain(config: TextModel) -> LayeredModel:
    """Return the model in one process, with its initial values in float64 and shared tensors."""
    model = LayeredModel(config).double()
    model.tie()
    initialise(model, 0, config)
    return model


def test_masks_may_be_left_out_but_not_the_decoders_ids(alone: None) -> None:
    for config in (bert(), t5()):
        model = parallelize(config, validate(parse("dp1"), config, BATCH), Execution(BATCH, "fp64"), "cpu", TokenLoss())
        x, sides, _ = sample(config, BATCH)
        needed = {name: side for name, side in sides.items() if name == "decoder_input_ids"}
        logits = model.predict(x, BATCH, **needed)
        assert logits is not None and torch.allclose(logits, plain(config).eval()(x, **needed))
    with pytest.raises(ModelError, match="t5_custom takes decoder_input_ids besides its input: pass each by its name"):
        model.predict(x, BATCH, attention_mask=sides["attention_mask"])


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        ("tp4+2d", "layers 'block' of bert_custom, whose parts only tp and \\+sp can split: leave \\+2d out"),
        ("tp8", "tp8 does not divide the 4 heads of bert_custom: use tp2 or tp4"),
        (
            "pp1: embed=tp2, *=dp2",
            "embed and head share embed.word_embeddings.weight, but their strategies are tp2 and",
        ),
        ("tp4", "tp4 leaves a rank without any of the 5 token ids of bert_custom: use a sm"),
    ],
)
def test_plans_that_do_not_fit_are_refused(mesh: str, message: str) -> None:
    with pytest.raises(StrategyError, match=message):
        validate(parse(mesh), bert(vocab_size=5 if mesh == "tp4" else 40), BATCH)
    validate(parse("tp4"), bert(vocab_size=7), BATCH)
