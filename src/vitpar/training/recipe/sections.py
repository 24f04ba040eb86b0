"""The sections of a recipe: every setting with its type, range and default."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from vitpar.limits import (
    MAX_ALTERNATIVES,
    MAX_BATCH_SIZE,
    MAX_BLOCKS,
    MAX_BUFFERED_SAMPLES,
    MAX_CLASSES,
    MAX_COUNT,
    MAX_MINUTES,
    MAX_SAMPLES,
    MAX_WORKERS,
)


class Section(BaseModel):
    """Settings that are refused where they are unknown, infinite or changed."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class ModelSection(Section):
    """Which model: timm's name, and what differs from it (None: as the name says).

    weights: a folder of weights, or a checkpoint, whose parameters a training begins with (None: initial values).
    init: the scheme of initial values (None: jax), see docs/models.md.
    """

    name: str = "vit_small_patch16_224"
    weights: str | None = None
    image_size: int | None = None
    patch_size: int | None = None
    width: int | None = None
    depth: int | None = None
    heads: int | None = None
    hidden: int | None = None
    pool: Literal["cls", "avg"] | None = None
    registers: int | None = None
    distillation: bool | None = None
    representation_size: int | None = None
    position: Literal["learned", "sincos2d"] | None = None
    qk_norm: bool | None = None
    norm_eps: float | None = None
    layer_scale: float | None = None
    drop_path: float | None = None
    dropout: float | None = None
    init: Literal["jax", "timm", "moco"] | None = None


class DataSection(Section):
    """Which data (a folder that ``vitpar data pack`` made; None: a stream) and how images are prepared.

    shuffle_window, shuffle_block: for disks that turn and mounts over a network, how many samples are mixed at a time,
    and in runs of how many they are stored (0: all are mixed). workers: decoding threads of a rank (None: chosen by the
    rank's cores, `vitpar.training.input.decoding_threads`; 0: none, images are decoded in the main thread).
    """

    path: str | None = None
    crop_scale: tuple[float, float] = (0.08, 1.0)
    crop_ratio: tuple[float, float] = (3 / 4, 4 / 3)
    flip: float = Field(0.5, ge=0, le=1)
    crop_pct: float = Field(0.875, gt=0, le=1)
    interpolation: Literal["bicubic", "bilinear"] = "bicubic"
    mean: tuple[float, float, float] = (0.485, 0.456, 0.406)
    std: tuple[float, float, float] = (0.229, 0.224, 0.225)
    shuffle_window: int = Field(0, ge=0, le=MAX_SAMPLES)
    shuffle_block: int = Field(256, ge=1, le=MAX_SAMPLES)
    workers: int | None = Field(None, ge=0, le=MAX_WORKERS)
    bad_sample: Literal["fail", "skip"] = "fail"

    @model_validator(mode="after")
    def _window_is_of_blocks(self) -> Self:
        if self.shuffle_window % self.shuffle_block:
            raise ValueError(
                f"data.shuffle_window is {self.shuffle_window}, which is no multiple of data.shuffle_block "
                f"{self.shuffle_block}: make it one"
            )
        return self


class StreamSection(Section):
    """Shards that are read by URL from begin to end, instead of data.path (all None: no stream).

    train, val: patterns with braces, such as ``https://host/train-{000000..001023}.tar``; also s3://, gs://, paths, and
    ``pipe:COMMAND``. samples, val_samples: images in them. classes: how many there are. label: where labels are, cls or
    json:FIELD. shuffle_buffer: samples that every rank mixes at a time. allow_pipe: whether URLs may run commands,
    which s3:// and gs:// do too.
    """

    train: str | tuple[str, ...] | None = None
    val: str | tuple[str, ...] | None = None
    samples: int | None = Field(None, ge=1, le=MAX_SAMPLES)
    val_samples: int | None = Field(None, ge=1, le=MAX_SAMPLES)
    classes: int | None = Field(None, ge=1, le=MAX_CLASSES)
    label: str = "cls"
    shuffle_buffer: int = Field(1000, ge=0, le=MAX_BUFFERED_SAMPLES)
    allow_pipe: bool = False

    def __bool__(self) -> bool:
        return any(value != type(self).model_fields[name].default for name, value in self)

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        missing = [name for name, value in self if value is None]
        if missing and self:
            raise ValueError(f"the recipe lacks 'stream.{missing[0]}', without which nothing can be streamed: give it")
        return self


class AugmentSection(Section):
    """What training images go through after crop and flip.

    policy: operations, as timm names them: rand-m9-n2-mstd0.5-inc1, original (AutoAugment) or 3a (None: none).
    color_jitter: how far brightness, contrast and saturation may go from 1, for all three or each. random_erasing:
    probability that a box becomes noise. repeats: how often a sample comes in a row, each time augmented anew.
    mixup, cutmix: alpha of the weights' Beta distribution (0: none). mixup_prob: that samples are mixed at all.
    mixup_switch_prob: that they are by CutMix, where there are both.
    """

    policy: str | None = None
    color_jitter: float | tuple[float, float, float] = 0.0
    random_erasing: float = Field(0.0, ge=0, le=1)
    repeats: int = Field(1, ge=1, le=MAX_BATCH_SIZE)
    mixup: float = Field(0.0, ge=0)
    cutmix: float = Field(0.0, ge=0)
    mixup_prob: float = Field(1.0, ge=0, le=1)
    mixup_switch_prob: float = Field(0.5, ge=0, le=1)


Implementation = Literal["auto", "foreach", "fused", "for-loop"]
"""Which of torch's optimizer implementations; auto is fused for AdamW and SGD, which alone have it, else foreach."""
AdjustLr = Literal["original", "match_rms_adamw"]
"""How the shape of a matrix changes Muon's learning rate, by the names of torch.optim.Muon."""
_Beta = Annotated[float, Field(ge=0, lt=1)]
_OWN_DEFAULTS = {"lamb": {"eps": 1e-6}, "lars": {"momentum": 0.9}, "muon": {"momentum": 0.95, "nesterov": True}}


class OptimizerSection(Section):
    """AdamW, SGD, LAMB, LARS or Muon. Weight decay leaves out biases, norms, positions, tokens and layer scales; so do
    LAMB's and LARS's trust ratios.

    Defaults that are an optimizer's own: eps 1e-6 for lamb, momentum 0.9 for lars, momentum 0.95 and nesterov for muon.
    Of muon, betas and eps are those of the AdamW for all that is no matrix of a block. trust_coefficient: of lars.
    ns_steps: Newton-Schulz iterations of muon.
    """

    name: Literal["adamw", "sgd", "lamb", "lars", "muon"] = "adamw"
    lr: float = Field(1e-3, gt=0)
    weight_decay: float = Field(0.05, ge=0)
    betas: tuple[_Beta, _Beta] = (0.9, 0.999)
    eps: float = Field(1e-8, gt=0)
    momentum: float = Field(0.0, ge=0, lt=1)
    nesterov: bool = False
    trust_coefficient: float = Field(1e-3, gt=0)
    ns_steps: int = Field(5, ge=1, lt=100)
    adjust_lr_fn: AdjustLr = "match_rms_adamw"
    implementation: Implementation = "auto"

    @model_validator(mode="before")
    @classmethod
    def _own_defaults(cls, values: Any) -> Any:
        return {**_OWN_DEFAULTS.get(str(values.get("name")), {}), **values} if isinstance(values, dict) else values


class LRScheduleSection(Section):
    """Linear warm-up from 0, then cosine to `min_lr`. Give the warm-up in steps or in epochs."""

    warmup_steps: int | None = Field(None, ge=0, le=MAX_COUNT)
    warmup_epochs: float | None = Field(None, ge=0, le=MAX_COUNT)
    min_lr: float = Field(0.0, ge=0)


class TrainSection(Section):
    """Length, batch and numerics of the training. clip_grad_norm: the largest norm of the gradients, 0 for any.
    ema_decay: decay of the parameters' moving average (None: no average). ema_warmup: whether it rises from 0.

    precision: auto is bf16 on GPUs that compute in it, else fp32 (``vitpar.training.recipe.machine``).
    reduce_dtype: what gradients are summed in over data-parallel ranks, of bf16, fp16 and fp8 alone (None: fp32).
    activation_memory_budget: the part of a compiled block's activations that the compiler may keep for backward, 0 to
    1; what is dearest to compute again it keeps first (None: all). compile: whether blocks are compiled (None: on GPUs,
    where that works). attention: the kernel that computes it (``vitpar.parallel.attention``); auto: on GPUs the fastest
    of those tried when the run begins.
    """

    batch_size: int = Field(128, ge=1, le=MAX_BATCH_SIZE)
    epochs: float | None = Field(None, gt=0, le=MAX_COUNT)
    steps: int | None = Field(None, ge=1, le=MAX_COUNT)
    seed: int = Field(0, ge=0, lt=2**63)
    precision: Literal["auto", "fp64", "fp32", "bf16", "fp16", "fp8"] = "auto"
    reduce_dtype: Literal["fp32", "bf16", "fp16"] | None = None
    label_smoothing: float = Field(0.0, ge=0, lt=1)
    clip_grad_norm: float = Field(1.0, ge=0)
    ema_decay: float | None = Field(None, gt=0, lt=1)
    ema_warmup: bool = False
    compile: bool | None = None
    attention: Literal["auto", "flash", "cudnn", "efficient", "math"] = "auto"
    activation_memory_budget: float | None = Field(None, ge=0, le=1)
    eval_every: int | None = Field(None, ge=1, le=MAX_COUNT)
    log_every: int = Field(10, ge=1, le=MAX_COUNT)


class CheckpointSection(Section):
    """When the state of the run is saved, and how many such checkpoints are kept.

    every_steps, every_epochs, every_samples, every_minutes: one of them, 0 for never (None at all: every epoch). first:
    also after step 1, so that what is wrong with the place shows early. keep: the newest so many (0: all).
    keep_every_steps: besides them, those of a step that is a multiple. keep_best: besides them, the one of the
    evaluation with the best top-1, which is then saved wherever it is. asynchronous: whether training goes on while
    files are written, with a copy of each rank's state in host memory.
    """

    every_steps: int | None = Field(None, ge=0, le=MAX_COUNT)
    every_epochs: float | None = Field(None, ge=0, le=MAX_COUNT)
    every_samples: int | None = Field(None, ge=0, le=MAX_COUNT)
    every_minutes: float | None = Field(None, ge=0, le=MAX_MINUTES)
    first: bool = False
    keep: int = Field(2, ge=0, le=MAX_COUNT)
    keep_every_steps: int | None = Field(None, ge=1, le=MAX_COUNT)
    keep_best: bool = False
    asynchronous: bool = True

    def interval(self, samples: int, batch_size: int) -> int:
        """Steps between checkpoints, for a training set of `samples`; 0 for none that are due by their step."""
        if self.every_steps is not None:
            return self.every_steps
        if self.every_minutes is not None:
            return 0
        epochs = 1.0 if self.every_epochs is None else self.every_epochs
        images = epochs * samples if self.every_samples is None else self.every_samples
        return max(1, round(images / batch_size)) if images else 0

    @property
    def never(self) -> bool:
        """Whether no checkpoints are wanted."""
        ways = (self.every_steps, self.every_epochs, self.every_samples, self.every_minutes)
        return 0 in ways and not self.keep_best and not self.first

    def kept(self, steps: Sequence[int], best: int | None) -> set[int]:
        """Of the checkpoints that there are, oldest first, those to keep. best: the step of the best evaluation."""
        steps = [step for step in steps if step != best]
        multiples = {step for step in steps if self.keep_every_steps and step % self.keep_every_steps == 0}
        return multiples | set(steps[-self.keep :]) | ({best} if best is not None else set())


class FaultsSection(Section):
    """What becomes of a run when something goes wrong.

    non_finite: at a step whose loss or gradients are not finite stop, or skip its update on all ranks, up to
    `max_skipped` times in a row. To skip, the host waits for the device at every step. hang_minutes: how long one step,
    evaluation batch or checkpoint may take before the run is ended as hung (0: for ever). debug_checks: whether
    parameters, gradients and the order of collectives are compared over the ranks at every step, which is slow.
    """

    non_finite: Literal["stop", "skip"] = "stop"
    max_skipped: int = Field(10, ge=1, le=MAX_COUNT)
    hang_minutes: float = Field(10.0, ge=0, le=MAX_MINUTES)
    debug_checks: bool = False


class ParallelSection(Section):
    """The plan: strategy string, schedule, micro-batches (by count or by size) and how blocks are dealt to stages.

    otherwise: strategies to try in turn where `mesh` does not fit the ranks there are, the model or the batch. The
    other settings hold for them too, but for those of a pipeline where they have none.
    """

    mesh: str = "dp1"
    otherwise: tuple[str, ...] = Field((), max_length=MAX_ALTERNATIVES)
    schedule: str = "1f1b"
    virtual_stages: int = Field(1, ge=1)
    microbatches: int | None = Field(None, ge=1)
    microbatch_size: int | None = Field(None, ge=1)
    split: str | tuple[int, ...] = "even"


class CommunicationSection(Section):
    """When gradients and gathered parameters are sent, as ``vitpar.strategy.execution.Communication`` says: speed and
    memory, never the result."""

    bucket_cap_mb: float | None = Field(None, gt=0)
    prefetch: int | None = Field(None, ge=0, le=MAX_BLOCKS)
    reshard_after_forward: bool | None = None
    reduce_every_microbatch: bool | None = None
