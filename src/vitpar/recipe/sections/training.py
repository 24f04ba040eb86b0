"""Sections about the updates: [optimizer], [lr_schedule], [train], [distill] and [loss_scale]."""

from collections.abc import Callable
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, field_validator, model_validator

from vitpar.errors import StrategyError
from vitpar.intervals import EPOCH, TEN_STEPS, Interval
from vitpar.limits import MAX_BATCH_SIZE, MAX_COUNT, MAX_MEASURE, MAX_WIDTH
from vitpar.recipe.rates.schedules import parse_drop_path, parse_image_sizes
from vitpar.recipe.rates.shapes import parse_shape
from vitpar.recipe.sections import Section
from vitpar.strategy import Plan, parse
from vitpar.strategy.execution import FP8_MIN_FEATURES, FastAccum
from vitpar.text import shown

Implementation = Literal["auto", "foreach", "fused", "for-loop", "triton"]
"""Torch's optimizer implementations, and triton: AdamW in one pass (``vitpar.training.optim.one_pass``)."""
AdjustLr = Literal["original", "match_rms_adamw"]
"""How the shape of a matrix changes Muon's learning rate, by the names of torch.optim.Muon."""
_Beta = Annotated[float, Field(ge=0, lt=1)]
_OWN_DEFAULTS: dict[str, dict[str, Any]] = {
    "adam": {"weight_decay": 0.0},
    "lion": {"lr": 1e-4, "betas": (0.9, 0.99)},
    "lamb": {"eps": 1e-6},
    "lars": {"momentum": 0.9},
    "muon": {"momentum": 0.95, "nesterov": True},
    "adafactor": {"lr": 1e-2, "weight_decay": 0.0},
}


def _read_by(parse: Callable[[str], object]) -> AfterValidator:
    """Return a validator of text, or None, that `parse` reads."""

    def readable(text: str | None) -> str | None:
        if text is not None:
            parse(text)
        return text

    return AfterValidator(readable)


def _above_zero(every: Interval) -> Interval:
    if not every.number:
        raise ValueError("0 steps are no interval: give at least 1")
    return every


class OptimizerSection(Section):
    """The optimizer.

    Weight decay, and the trust ratios of LAMB and LARS, leave out biases, norms, position embeddings, tokens and layer
    scales. Muon updates the matrices of blocks, AdamW everything else.
    """

    name: Literal["adamw", "adam", "sgd", "lion", "lamb", "lars", "muon", "adafactor"] = "adamw"
    """Algorithm. By default adam has weight_decay 0, lion lr 1e-4 and betas 0.9 and 0.99, lamb eps 1e-6, lars momentum
    0.9, muon momentum 0.95 and nesterov, adafactor lr 0.01 and weight_decay 0."""
    lr: float = Field(1e-3, gt=0)
    """Largest learning rate, after warm-up."""
    lr_batch_size: int | None = Field(None, ge=1, le=MAX_BATCH_SIZE)
    """Batch size that `lr` is for. The rate of another batch size is scaled; `lr` is not if this is unset."""
    lr_scaling: Literal["linear", "sqrt"] = "linear"
    """How the learning rate grows with the batch size."""
    weight_decay: float = Field(0.05, ge=0)
    """Decoupled weight decay (adam, sgd: L2 penalty)."""
    weight_decay_end: float | None = Field(None, ge=0)
    """Weight decay at the end of the run, reached by half a cosine from `weight_decay`, as in DINO; constant if
    unset."""
    layer_decay: float = Field(1.0, gt=0, le=1)
    """Factor by which the learning rate falls from each layer to the one below it, for fine-tuning: the head has `lr`,
    the last block `layer_decay` times that, embed the least. Groups and scales are those of timm's `--layer-decay`."""
    betas: tuple[_Beta, _Beta] = (0.9, 0.999)
    """Decay rates of the averages of the gradient and of its square (adamw, adam, lamb, muon's AdamW); of the average
    that gives the direction and of the one that is kept (lion)."""
    eps: float = Field(1e-8, gt=0)
    """Number added to the denominator of the update (adamw, adam, lamb, muon's AdamW)."""
    momentum: float = Field(0.0, ge=0, lt=1)
    """Momentum (sgd, lars, muon)."""
    nesterov: bool = False
    """Whether momentum is Nesterov's (sgd, lars, muon)."""
    trust_coefficient: float = Field(1e-3, gt=0)
    """Factor of the trust ratio (lars)."""
    ns_steps: int = Field(5, ge=1, lt=100)
    """Number of Newton-Schulz iterations (muon)."""
    adjust_lr_fn: AdjustLr = "match_rms_adamw"
    """How the shape of a matrix changes its learning rate (muon), by the names of torch.optim.Muon."""
    implementation: Implementation = "auto"
    """Implementation of the update. triton (adamw on GPUs) clips, updates, copies to 16 bits and averages in one pass;
    the others are torch's. auto is triton where it works, else fused where the optimizer has it, else foreach."""

    @model_validator(mode="before")
    @classmethod
    def _own_defaults(cls, values: Any) -> Any:
        return {**_OWN_DEFAULTS.get(str(values.get("name")), {}), **values} if isinstance(values, dict) else values


class LoraSection(Section):
    """Low-rank adapters (LoRA) of linear layers, which are trained in place of the model's own parameters."""

    rank: int | None = Field(None, ge=1, le=MAX_WIDTH)
    """Features between the two matrices A and B of an adapter; no adapters if unset."""
    alpha: float = Field(8.0, gt=0, le=MAX_MEASURE)
    """Numerator of the factor alpha / rank of an adapter's output, as in peft."""
    targets: tuple[str, ...] | None = Field(None, min_length=1, max_length=1_024)
    """Linear layers that get an adapter: patterns of their names, such as `blocks.*.attn.qkv`, or ends of names, such
    as `qkv`; the linear layers of attention and MLP in all blocks if unset."""
    train: str | None = None
    """Parameters that are trained besides the adapters, as a list such as `"head, *.bias"` (as for `train.freeze`); the
    head, but for what it shares with other layers, if unset. An empty list trains the adapters alone."""
    weights: str | None = None
    """Folder of adapters in peft's format that the adapters begin with; random A and zero B if unset."""


class LRScheduleSection(Section):
    """Learning rate over steps: a linear warm-up, then a shape down to `min_lr`."""

    shape: Annotated[str, _read_by(parse_shape)] = "cosine"
    """Course after the warm-up: constant, linear, cosine, polynomial, step, multistep, rsqrt or wsd, with arguments as
    in `step(every=30 epochs, gamma=0.1)`."""
    warmup: Annotated[Interval | None, AfterValidator(lambda given: given and given.in_steps())] = None
    """Length of the warm-up; none if unset."""
    warmup_lr: float | None = Field(None, ge=0)
    """Learning rate of the first update; the largest over the steps of the warm-up if unset."""
    min_lr: float = Field(0.0, ge=0)
    """Learning rate at the end."""
    after_warmup: bool | None = None
    """Whether the shape begins after the warm-up rather than with the run; if unset, step and multistep begin with the
    run. False is timm without `--warmup-prefix`."""
    per_epoch: bool = False
    """Whether the learning rate changes between epochs only, as in timm without `--sched-on-updates`."""


class TrainSection(Section):
    """Length, batch and numerics of the training."""

    batch_size: int = Field(128, ge=1, le=MAX_BATCH_SIZE)
    """Images of a step over all ranks."""
    epochs: float | None = Field(None, gt=0, le=MAX_COUNT)
    """Passes over the training set; instead of `steps`."""
    steps: int | None = Field(None, ge=1, le=MAX_COUNT)
    """Number of updates; instead of `epochs`."""
    seed: int = Field(0, ge=0, lt=2**63)
    """Seed of initial values, order of samples, augmentation, drop-path and dropout."""
    precision: Literal["auto", "fp64", "fp32", "bf16", "fp16", "fp8"] = "auto"
    """Precision of computing; parameters and optimizer stay in fp32 (with fp64 in fp64). auto is bf16 on GPUs that
    compute in it, else fp32."""
    reduce_dtype: Literal["fp32", "bf16", "fp16"] | None = None
    """Type in which gradients are summed over data-parallel ranks with bf16, fp16 and fp8; fp32 if unset."""
    fp8_min_features: int = Field(FP8_MIN_FEATURES, ge=0, le=MAX_COUNT)
    """Linear layers of blocks multiply in float8 (fp8) if the harmonic mean of their input and output features is at
    least this; smaller ones, which lose time by it, in bf16."""
    fp8_fast_accum: FastAccum = "forward"
    """Float8 products that GPUs accumulate in fewer bits than float32, which is faster: those of forward, always, or
    never."""
    label_smoothing: float = Field(0.0, ge=0, lt=1)
    """Probability mass that the target spreads over all classes."""
    clip_grad_norm: float = Field(1.0, ge=0)
    """Largest global norm of the gradients; 0 turns clipping off."""
    clip_by_part: bool = False
    """Whether that is the largest norm of each part of a model that has parts: backbone and heads of task dino."""
    freeze: str | None = None
    """Layers and parameters that are not trained, as a list such as `"embed, 0-9"`, for fine-tuning: embed, head,
    numbers of blocks, names such as stage1, * for all blocks, or patterns of parameter names such as `*.norm1.*`. `!`
    before any of them makes an exception: `"embed, *"` trains only the head, `"embed, *, !*.bias"` also all biases."""
    ema_decay: float | None = Field(None, gt=0, lt=1)
    """Decay of a moving average of the parameters, which is what is evaluated and saved as weights; no average if
    unset."""
    ema_decay_end: float | None = Field(None, gt=0, le=1)
    """Decay of that average at the end of the run, reached by half a cosine from `ema_decay`, as in DINO; constant if
    unset."""
    ema_warmup: bool = False
    """Whether that decay rises from 0, as in timm's ModelEmaV3."""
    compile: bool | None = None
    """Whether blocks are compiled by torch.compile; on GPUs, where that works, if unset."""
    attention: Literal["auto", "flash", "cudnn", "efficient", "packed", "math"] = "auto"
    """Attention kernel; on GPUs auto takes the fastest of cudnn, flash and efficient, measured when the run begins."""
    activation_memory_budget: float | None = Field(None, ge=0, le=1)
    """Part of a compiled block's activations that the compiler keeps for backward; all if unset."""
    drop_path_schedule: Annotated[str, _read_by(parse_drop_path)] = "constant"
    """Course of `model.drop_path`: constant, `early(until=50 epochs)`, with `form=linear` falling to 0 at its end, or
    `late(after=50 epochs)` (arXiv 2303.01500)."""
    image_sizes: Annotated[str | None, _read_by(parse_image_sizes)] = None
    """Smaller images at the beginning of the run, such as `128 until 40 %, 192 until 80 %`; the rest has
    `model.image_size`. All have that size if unset."""
    eval_every: Annotated[Interval, AfterValidator(_above_zero)] = EPOCH
    """Interval between evaluations, also in minutes."""
    log_every: Annotated[Interval, AfterValidator(_above_zero), AfterValidator(Interval.in_steps)] = TEN_STEPS
    """Interval between lines of metrics."""

    @field_validator("freeze", mode="before")
    @classmethod
    def _one_block(cls, value: Any) -> Any:
        # --set train.freeze=3 gives a number.
        return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


class DistillSection(Section):
    """Distillation: a frozen teacher, whose logits the model learns besides the labels (docs/losses.md)."""

    teacher: str | None = None
    """Folder of the teacher: a run, its weights or a checkpoint, imported weights, or hf:OWNER/NAME. It takes the
    images of the model, and has the classes of the data. No distillation if unset."""
    kind: Literal["hard", "soft", "logits"] = "hard"
    """Loss of the distillation token's classifier: cross-entropy with the teacher's most probable class (hard), or the
    divergence from its probabilities (soft); or that divergence for a model without the token (logits)."""
    alpha: float = Field(0.5, ge=0, le=1)
    """Share of the teacher in the loss; the rest is that of the labels."""
    tau: float = Field(1.0, gt=0)
    """Temperature that logits are divided by (soft, logits)."""
    plan: str = "dp"
    """Strategy of the teacher on the ranks of the training, of dp, fsdp and tp: dp has a copy on every rank."""

    def teacher_plan(self, ranks: int) -> Plan:
        """Return the teacher's plan. Raises StrategyError for roles that no teacher has, or other `ranks`."""
        plan = parse(self.plan)
        for strategy in plan.distinct:
            other = [
                *(["pp"] if plan.pp != 1 else []),
                *([f"+{strategy.tensor_mode}"] if strategy.tensor_mode != "1d" else []),
                *([f"+zero{strategy.zero}"] if strategy.zero else []),
                *(["+ckpt"] if strategy.checkpoint else []),
                *(["+offload"] if strategy.offload else []),
            ]
            if other:
                raise StrategyError(
                    f"distill.plan '{shown(self.plan)}' has {other[0]}, which a teacher does not support: use dp, fsdp "
                    "and tp, also with +sp"
                )
        try:
            return plan.resolve(ranks)
        except StrategyError as error:
            raise StrategyError(f"distill.plan: {error}") from None


class LossScaleSection(Section):
    """Scale of the loss in fp16. Names and defaults are ColossalAI's, except the default bounds."""

    dynamic: bool = True
    """Whether the scale changes from `initial_scale`."""
    initial_scale: float = Field(2.0**16, gt=0, le=2.0**32)
    """Scale of the first step. From one larger than Megatron-LM's, 2**32, falling would take too many steps."""
    min_scale: float = Field(1.0, gt=0)
    """Smallest scale; an overflow there ends the run."""
    max_scale: float = Field(2.0**24, gt=0)
    """Largest scale."""
    growth_factor: float = Field(2.0, gt=1)
    """Factor by which the scale grows."""
    backoff_factor: float = Field(0.5, gt=0, lt=1)
    """Factor by which the scale falls after an overflow."""
    growth_interval: int = Field(1000, ge=1, le=MAX_COUNT)
    """Steps without an overflow after which the scale grows."""
    hysteresis: int = Field(2, ge=1, le=MAX_COUNT)
    """Overflows since the last growth from which on the scale falls."""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.dynamic and not self.min_scale <= self.initial_scale <= self.max_scale:
            raise ValueError(
                f"loss_scale.initial_scale {self.initial_scale} is not within min_scale {self.min_scale} and max_scale "
                f"{self.max_scale}: change one of them"
            )
        return self
