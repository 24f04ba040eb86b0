"""BERT and T5 under plans: loss, gradients and predictions equal those of one process with shared tensors."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from helpers.plans import DUALPIPEV, INTERLEAVED, ZBV
from helpers.ranks import RankPool
from helpers.text_models import PADDED, V1_1, TextModel, TokenLoss, bert, sample, t5, token_loss
from vitpar import parse, validate
from vitpar.data import Skipped
from vitpar.errors import ModelError, StrategyError
from vitpar.models.initial import initialise
from vitpar.models.layers import LayeredModel
from vitpar.parallel import parallelize
from vitpar.parallel.vocabulary import VocabularyPart, first_hits, token_losses
from vitpar.sharded import local
from vitpar.strategy import Execution
from vitpar.tasks.input import EvalInput
from vitpar.tasks.task import Task
from vitpar.training.evaluate import evaluate
from vitpar.weights.folder import load_weights, save_weights

BATCH = 8
MODELS: dict[str, TextModel] = {
    "bert": bert(depth=4, dropout=0.2, vocab_size=41),  # prime: parts of 21 and 20, or of 11 and 8
    "t5": t5(dropout=0.2, vocab_size=43),
    "t5 v1.1": t5(**V1_1, depth=1, decoder_depth=3),
}
KEYS = torch.arange(1, BATCH + 1) * 1_000_003
CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("bert", "dp1", {"microbatches": 2}),
    ("bert", "tp2", {}),
    ("bert", "tp2+sp", {"microbatches": 2}),
    ("bert", "tp4", {}),
    ("bert", "fsdp2xtp2+sp", {"microbatches": 2}),
    ("bert", "pp2xtp2", {"microbatches": 2}),
    ("bert", "pp2xtp2", ZBV),
    ("bert", "pp1: embed=tp2+sp+ckpt, head=tp2+sp+ckpt, 0=tp2, 1=fsdp2, *=dp2", {}),
    ("bert", "tp2xdp2+sp+ckpt.selective", {}),
    ("bert", "fsdp2", {}),
    ("bert", "dp2+zero2", {"microbatches": 2}),
    ("bert", "pp2", {"microbatches": 4}),
    ("bert", "pp2xtp2+sp", {"microbatches": 2}),
    ("bert", "pp2", ZBV),
    ("bert", "pp1: embed=fsdp2, 0=tp2, 1=tp2+sp+ckpt, 2=dp2, *=fsdp2", {}),
    ("t5", "tp2", {}),
    ("t5", "tp2xfsdp2+sp", {}),
    ("t5", "fsdp2xtp2", {}),
    ("t5", "dp2xtp2+zero1", {}),
    ("t5", "pp1: embed=tp2, dec_embed=tp2, head=tp2, 0=fsdp2, *=tp2+sp", {}),
    ("t5", "dp2+zero1", {}),
    ("t5", "pp2xfsdp2", {"microbatches": 2}),
    ("t5", "pp2", ZBV),
    ("t5", "pp2", INTERLEAVED),
    ("t5", "pp1: embed=fsdp2, 0=tp2, 1=dp2, 2=fsdp2, 3=tp2+sp, 4=tp2+ckpt, *=fsdp2", {}),
    ("t5 v1.1", "tp2+sp", {}),
    ("t5 v1.1", "fsdp2", {}),
    ("t5 v1.1", "pp2xtp2", DUALPIPEV),
]
IDS = [f"{name}-{mesh.replace(' ', '')}-{plan.get('schedule', '')}" for name, mesh, plan in CASES]


def gradients(
    device: torch.device, name: str, mesh: str, more: dict[str, Any], precision: str = "fp64"
) -> tuple[float, float, dict[str, Tensor], bool]:
    """Return loss, hits, gradients, and whether `predict` equals the plain model; runs on every rank."""
    config = MODELS[name]
    x, sides, targets = sample(config, BATCH)
    plan = validate(replace(parse(mesh), **more), config, BATCH)
    model = parallelize(config, plan, Execution(BATCH, precision), device, TokenLoss(measures=True))
    model.loss_scale = scale = 1024.0 if precision == "fp16" else 1.0
    rows = x[model.image_rows(BATCH)] if model.takes_images else None
    part = model.forward_backward(rows, targets, KEYS if config.stochastic else None, **sides)
    found = {}
    for parameter_name, p in model.named_parameters():
        assert p.grad is not None, parameter_name
        found[parameter_name] = (p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad) / scale
    logits, right = model.predict(rows, BATCH, **sides), True
    if logits is not None and precision == "fp64":
        expected = plain(config).eval()(x, **sides)[model.output_rows(BATCH)]
        right = torch.allclose(model.complete(logits), expected)
        if model.vocabulary is not None:
            start, group = model.vocabulary.start, model.vocabulary.group
            right &= logits.shape[-1] == -(-config.vocab_size // group.size()) or group.rank() == group.size() - 1
            right &= torch.allclose(logits, expected[..., start : start + logits.shape[-1]])
    hits = model.global_loss(part.new_zeros(1) if model.measured is None else model.measured)
    return model.global_loss(part).item(), hits.item(), found, right


def plain(config: TextModel) -> LayeredModel:
    """Return the model in one process, with its initial values in float64 and shared tensors."""
    model = LayeredModel(config).double()
    model.tie()
    initialise(model, 0, config)
    return model


@pytest.mark.parametrize(("name", "mesh", "more"), CASES, ids=IDS)
def test_gradients_equal_one_process(
    name: str, mesh: str, more: dict[str, Any], ranks: Callable[[int], RankPool]
) -> None:
    config = MODELS[name]
    model, (x, sides, targets) = plain(config), sample(config, BATCH)
    logits = model(x, KEYS if config.stochastic else None, **sides)
    loss, expected_hits = token_loss(logits, targets), (logits.argmax(-1) == targets).sum().item()
    loss.backward()
    seen = set()
    for found, hits, gradient, right in ranks(parse(mesh).world_size).run(gradients, name, mesh, more):
        assert right and hits == pytest.approx(expected_hits) and found == pytest.approx(loss.item(), abs=1e-12)
        for parameter_name, value in gradient.items():
            expected = model.get_parameter(config.owner(parameter_name)).grad
            assert expected is not None
            error = (value - expected).abs().max().item() / expected.abs().max().item()
            assert error < 1e-11, parameter_name
            seen.add(parameter_name)
    assert seen == {f"{layer.name}.{key}" for layer in config.layers.values() for key in layer.parameters}


@pytest.mark.parametrize(
    ("name", "mesh", "precision", "limit"),
    [
        ("bert", "tp2+sp", "bf16", 0.1),
        ("bert", "fsdp2", "bf16", 0.1),
        ("t5 v1.1", "dp2", "bf16", 0.1),
        ("bert", "tp2+sp", "fp16", 0.05),
        ("t5 v1.1", "tp2", "fp16", 0.05),
    ],
)
def test_gradients_in_16_bits_are_those_of_one_process_up_to_rounding(
    name: str, mesh: str, precision: str, limit: float, ranks: Callable[[int], RankPool]
) -> None:
    config = MODELS[name]
    model, (x, sides, targets) = plain(config), sample(config, BATCH)
    token_loss(model(x, KEYS if config.stochastic else None, **sides), targets).backward()
    for _, _, gradient, _ in ranks(2).run(gradients, name, mesh, {}, precision):
        for parameter_name, value in gradient.items():
            expected = model.get_parameter(config.owner(parameter_name)).grad
            assert expected is not None
            assert ((value - expected).norm() / expected.norm()).item() < limit, parameter_name


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
        (
            "tp4+2d",
            "cannot split the layers 'block' of bert_custom, whose parts only tp and \\+sp can split: leave \\+2d out",
        ),
        ("tp8", "tp8 does not divide the 4 heads of bert_custom: use tp2 or tp4"),
        (
            "pp1: embed=tp2, *=dp2",
            "embed and head share embed.word_embeddings.weight, but their strategies are tp2 and dp2: ",
        ),
        ("pp1: embed=fsdp2, *=dp2", "embed and head share embed.word_embeddings.weight, but their strategies are"),
    ],
)
def test_plans_that_do_not_fit_are_refused(mesh: str, message: str) -> None:
    with pytest.raises(StrategyError, match=message):
        validate(parse(mesh), bert(), BATCH)


@dataclass(frozen=True)
class Words(Task):
    """Task, input and data set of one batch in one, as far as `evaluate` needs them."""

    config: TextModel = field(default_factory=lambda: MODELS["bert"])
    place = "memory"

    def __len__(self) -> int:
        return BATCH

    def trial(self) -> tuple[Tensor, Tensor]:
        return torch.zeros(1, *self.config.output_shape), torch.zeros(1, self.config.output_shape[0]).long()

    def sums(self, outputs: Tensor, targets: Tensor, part: VocabularyPart | None = None) -> Tensor:
        numbers = (targets != PADDED), token_losses(outputs, targets, part), first_hits(outputs, targets, part)
        return torch.stack([number.double().sum() for number in numbers])

    def result(self, sums: Tensor) -> dict[str, float]:
        return dict(zip(("tokens", "loss", "hits"), sums.tolist(), strict=True))

    def predict(self, outputs: Tensor) -> dict[str, Tensor]:
        return {"ids": outputs.argmax(-1)}

    @property
    def task(self) -> Any:
        return self

    def eval_batches(self, images: Any) -> Iterator[int]:
        yield 0

    def eval_step(self, batch: int) -> EvalInput:
        x, sides, targets = sample(self.config, BATCH)
        return EvalInput(x, targets, torch.zeros(BATCH, dtype=torch.int64), sides)

    def skipped(self, loader: Any) -> Skipped:
        return Skipped()


def evaluated(device: torch.device, mesh: str, folder: Path) -> tuple[dict[str, float], list[Tensor], bool]:
    """Return metrics, predictions on rank 0, and whether saved weights are loaded again; runs on every rank."""
    config, found = MODELS["bert"], []
    plan = validate(parse(mesh), config, BATCH)
    model = parallelize(config, plan, Execution(BATCH, "fp64"), device, TokenLoss())
    words: Any = Words(config=config)
    predict = model.predict
    with pytest.MonkeyPatch.context() as patch:  # the input has the rows of all ranks
        mine = lambda x, *more, **sides: predict(x[model.image_rows(BATCH)], *more, **sides)  # noqa: E731
        patch.setattr(model, "predict", mine)
        result = evaluate(model, words, words, predicted=lambda p: found.append(p.values["ids"]))
    save_weights(model, folder, "")
    before = {name: p.clone() for name, p in model.state_dict().items()}
    for parameter in model.state_dict().values():
        local(parameter).zero_()
    load_weights(model, folder)
    same = all(torch.equal(local(p), local(before[name])) for name, p in model.state_dict().items())
    return dict(result.metrics), found, same


@pytest.mark.parametrize("mesh", ["tp2", "dp2xtp2+sp", "fsdp2xtp2"])
def test_a_split_vocabulary_is_evaluated_and_saved_complete(
    mesh: str, tmp_path: Path, ranks: Callable[[int], RankPool]
) -> None:
    config = MODELS["bert"]
    model, (x, sides, targets) = plain(config).eval(), sample(config, BATCH)
    logits, words = model(x, **sides), Words(config=config)
    expected = words.result(words.sums(logits, targets))
    results = ranks(parse(mesh).world_size).run(evaluated, mesh, tmp_path / "weights")
    for metrics, _, same in results:
        assert same and metrics == pytest.approx(expected, rel=1e-12)
    (ids,) = results[0][1]
    assert torch.equal(ids, logits.argmax(-1)) and not any(found for _, found, _ in results[1:])
    (file,) = (tmp_path / "weights").glob("*.safetensors")
    saved = load_file(file)
    assert saved.keys() == dict(model.named_parameters()).keys() - config.shared.keys()
    assert all(torch.equal(value, model.get_parameter(name)) for name, value in saved.items())


def test_more_ranks_than_parts_of_the_vocabulary_are_refused() -> None:
    with pytest.raises(
        StrategyError, match="tp4 leaves a rank without any of the 5 token ids of bert_custom: use a sm"
    ):
        validate(parse("tp4"), bert(vocab_size=5), BATCH)
    validate(parse("tp4"), bert(vocab_size=7), BATCH)
