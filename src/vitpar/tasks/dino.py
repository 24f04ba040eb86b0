"""Self-distillation of images without labels: DINOv2 (arXiv 2304.07193).

A student sees global and local crops of an image, and global ones with masked patches. It learns the scores of
prototypes that its teacher, its own running average, gives the complete global crops: those of class tokens (DINO), of
masked patches (iBOT), and it spreads the features of class tokens (KoLeo).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from vitpar.errors import RecipeError
from vitpar.limits import MAX_BATCH_SIZE, MAX_CLASSES, MAX_MEASURE
from vitpar.tasks.task import Metric, Task

if TYPE_CHECKING:
    from torch import Tensor

    from vitpar.models.config import ModelConfig
    from vitpar.models.dino.config import DINOConfig
    from vitpar.parallel.vocabulary import VocabularyPart
    from vitpar.recipe.rates.shapes import RunLengths
    from vitpar.strategy import Plan


_RANGES = (
    ("prototypes", 1, MAX_CLASSES),
    *((f"{loss}_weight", 0, MAX_MEASURE) for loss in ("dino", "ibot", "koleo")),
    ("koleo_group", 2, MAX_BATCH_SIZE),
    *((name, 1e-3, MAX_MEASURE) for name in ("student_temp", "teacher_temp", "warmup_teacher_temp")),
    *((name, 0, MAX_MEASURE) for name in ("backbone_rate", "patch_embed_rate")),
    *((name, 0, 1) for name in ("teacher_temp_warmup", "freeze_last_layer", "heads_first", "solarize")),
    *((name, 0, 1) for name in ("mask_probability", "mask_ratio_min")),
    ("mask_ratio_max", 0, 0.5),  # as many places as a model has
)
"""Least and largest value of options, by name."""


@dataclass(frozen=True)
class DINO(Task):
    """Self-distillation of images, whose labels are not used. Defaults are those of DINOv2.

    Targets are the scores of the teacher over its temperature, so that a softmax of them gives its probabilities:
    [batch, 2 + places, prototypes], NaN in the places of a crop beyond its masked patches. Each rank has those of its
    outputs and prototypes.
    """

    NAME: ClassVar[str] = "dino"
    FAMILIES: ClassVar[tuple[str, ...]] = ("dino",)
    LOCAL_TARGETS: ClassVar[bool] = True
    PREDICTS: ClassVar[bool] = False
    METRICS: ClassVar[tuple[Metric, ...]] = (
        Metric("knn", "kNN", share=True),
        Metric("feature_std", "deviation of features"),
    )
    AVERAGES: ClassVar[bool] = True

    prototypes: int = 65_536
    """Prototypes of each head."""
    dino_weight: float = 1.0
    """Weight of the loss of class tokens."""
    ibot_weight: float = 1.0
    """Weight of the loss of masked patches."""
    koleo_weight: float = 0.1
    """Weight of KoLeo, for each of the two global crops."""
    koleo_group: int = 16
    """Consecutive images of a batch among which KoLeo looks for the nearest."""
    student_temp: float = 0.1
    """Temperature of the student."""
    teacher_temp: float = 0.07
    """Temperature of the teacher after its warm-up."""
    warmup_teacher_temp: float = 0.04
    """Temperature of the teacher at the beginning, from which it rises linearly."""
    teacher_temp_warmup: float = 0.3
    """Share of the run in which it rises."""
    freeze_last_layer: float = 0.01
    """Share of the run, at its beginning, in which prototypes do not change."""
    heads_first: float = 0.0
    """Share of the run, at its beginning, in which only the heads change, for a backbone that was trained before."""
    backbone_rate: float = 1.0
    """Factor of the learning rate of the backbone."""
    patch_embed_rate: float = 0.2
    """Factor of the learning rate of the patch embedding, besides that of the backbone."""
    centering: str = "sinkhorn_knopp"
    """How teacher scores are balanced over prototypes: sinkhorn_knopp, or centering by a running mean of the scores."""
    mask_probability: float = 0.5
    """Share of the global crops that have masked patches."""
    mask_ratio_min: float = 0.1
    """Share of the patches that are masked in the crop with the fewest, about."""
    mask_ratio_max: float = 0.5
    """Share in the crop with the most; at most 0.5."""
    local_crops_scale: tuple[float, float] = (0.05, 0.32)
    """Range of the area of a local crop, as a fraction of the image's; that of a global one is `data.crop_scale`."""
    blur: tuple[float, float, float] = (0.0, 0.9, 0.5)
    """Probability of a blur in the first and second global crop, and in a local one. The published weights were trained
    with these; their paper has 1, 0.1 and 0.5 (facebookresearch/dinov3, issue 286)."""
    solarize: float = 0.2
    """Probability that the second global crop is solarised."""

    def __post_init__(self) -> None:
        if self.centering not in ("sinkhorn_knopp", "centering"):
            raise ValueError(f"centering is '{self.centering}': use sinkhorn_knopp or centering")
        for name, least, most in _RANGES:
            if not least <= (value := getattr(self, name)) <= most:
                raise ValueError(f"{name} is {value}, not from {least:g} to {most:g}")
        for name, numbers in (("local_crops_scale", 2), ("blur", 3)):
            given = tuple(map(float, getattr(self, name)))
            if len(given) != numbers:
                raise ValueError(f"{name} has {len(given)} numbers instead of {numbers}")
            object.__setattr__(self, name, given)

    @property
    def outputs(self) -> int:
        return self.prototypes

    def refuse_model(self, config: ModelConfig) -> None:
        if self.prototypes < dino_of(config).embed_dim:
            raise RecipeError(
                f"task.options.prototypes is {self.prototypes}, but tokens of {config.name} have "
                f"{dino_of(config).embed_dim} features: use at least as many prototypes"
            )
        if dino_of(config).teacher:
            raise RecipeError("model.options.teacher is true, which stands for the teacher of a training: leave it out")

    @property
    def sample_group(self) -> int:
        return self.koleo_group if self.koleo_weight else 1

    def refuse_plan(self, config: ModelConfig, plan: Plan, batch_size: int) -> None:
        from vitpar.strategy import batch_arithmetic, output_layout

        strategy = plan.strategies(config.layer_names)[config.layer_names[-1]]
        batch = batch_arithmetic(plan, batch_size)
        images = batch.microbatch_rows // output_layout(strategy)[0].rows
        if images % self.sample_group:
            raise RecipeError(
                f"a rank has {images} of the {batch.microbatch_rows} images of a micro-batch under '{plan}', which are "
                f"no groups of {self.koleo_group} for KoLeo: set task.options.koleo_group to a divisor, use fewer "
                "micro-batches, or a larger batch"
            )

    @classmethod
    def model_for(cls, config: ModelConfig) -> ModelConfig | None:
        from vitpar.models.dino.config import DINOConfig

        return DINOConfig.continuing(config.unadapted if config.pretrained is None else config.pretrained[0])

    def words(self, row: Mapping[str, float], brief: bool = False) -> str:
        return "  ".join(f"{metric.words} {metric.shown(row[metric.name], brief)}" for metric in self.METRICS)

    @property
    def unchecked(self) -> str:
        if self.centering == "sinkhorn_knopp":
            return ""
        return "vitpar check has no formula of its own for task.options.centering 'centering': leave it out"

    def teacher_config(self, config: ModelConfig) -> ModelConfig:
        from vitpar.models.lora import LoRA

        teacher = dino_of(config).of_teacher
        return replace(config, whole=teacher) if isinstance(config, LoRA) else teacher

    def sides(self, keys: Tensor, rows: Collection[int], config: ModelConfig) -> Mapping[str, Tensor]:
        import torch

        from vitpar.tasks.block_masks import block_masks

        c, ratios = dino_of(config), (self.mask_ratio_min, self.mask_ratio_max)
        side = c.image_size // c.patch_size
        masks = block_masks(keys.numpy(), rows, side, self.mask_probability, ratios)
        return {"masks": torch.from_numpy(masks)}

    def schedules(self, run: RunLengths) -> Mapping[str, Callable[[int], float]]:
        rising, held = round(self.teacher_temp_warmup * run.steps), self.freeze_last_layer * run.steps
        alone, first, last = self.heads_first * run.steps, self.warmup_teacher_temp, self.teacher_temp

        def backbone(step: int) -> float:
            return 0.0 if step <= alone else self.backbone_rate

        return {
            "teacher_temp": lambda step: first + (last - first) * min(1.0, (step - 1) / max(1.0, rising - 1)),
            "rate_prototypes": lambda step: float(step > held),
            "rate_backbone": backbone,
            "rate_patch_embed": lambda step: self.patch_embed_rate * backbone(step),
        }

    def total(self, outputs: Tensor, targets: Tensor, part: VocabularyPart | None = None) -> Tensor:
        """Return the sum of the losses of all images, 0-dim. part: of the prototypes that `outputs` are of."""
        import torch

        from vitpar.tasks.soft_loss import koleo, soft_cross_entropy

        wide = torch.float64 if outputs.dtype is torch.float64 else torch.float32
        scores, features = outputs.split([outputs.shape[1] - 2, 2], dim=1)
        weights = self._weights(scores, targets).to(wide)
        loss = soft_cross_entropy(scores, targets, weights, self.student_temp, self.prototypes, part)
        if self.koleo_weight:
            of_crops = (koleo(features[:, crop].to(wide), self.koleo_group) for crop in (0, 1))
            loss = loss + self.koleo_weight * sum(of_crops)
        return loss

    def _weights(self, scores: Tensor, targets: Tensor) -> Tensor:
        """Return the weight of each row of scores in the loss of its image, [samples, rows]."""
        import torch

        classes, places = scores.shape[1] - targets.shape[1] + 2, targets.shape[1] - 2
        pairs = 2 * (classes - 2) + 2
        counts = (~targets[:, 2:, 0].isnan()).unflatten(1, (2, places // 2)).double()
        patches = self.ibot_weight * 0.5 * counts / counts.sum(-1, keepdim=True).clamp(min=1)
        of_classes = counts.new_full((len(scores), classes), self.dino_weight / pairs)
        return torch.cat([of_classes, patches.flatten(1)], dim=1)

    def measure(self, outputs: Tensor, targets: Tensor, part: VocabularyPart | None = None) -> None:
        return None

    def reference_taught(self, outputs: Tensor, taught: Tensor, sides: Mapping[str, Tensor]) -> Tensor:
        """Return the loss of each image by loops over crops and patches, with Sinkhorn-Knopp on matrices."""
        import torch

        scores, features = outputs[:, :-2] / self.student_temp, outputs[:, -2:]
        logs, taught = scores.log_softmax(-1), taught[:, :-2] / self.warmup_teacher_temp
        classes, places = logs.shape[1] - taught.shape[1] + 2, taught.shape[1] // 2 - 1
        counts = sides["masks"].sum(-1)
        of_classes = _spread(taught[:, :2].flatten(0, 1)).unflatten(0, (-1, 2))
        filled = [
            (image, 2 + crop * places + place)
            for image, both in enumerate(counts.tolist())
            for crop, count in enumerate(both)
            for place in range(count)
        ]
        of_patches = dict(zip(filled, _spread(torch.stack([taught[at] for at in filled])), strict=True))
        losses = []
        for image in range(len(outputs)):
            pairs = [(crop, other) for crop in range(classes) for other in range(2) if crop != other]
            errors = [-(of_classes[image, t] * logs[image, s]).sum() for s, t in pairs]
            loss = self.dino_weight * torch.stack(errors).mean()
            for crop, count in enumerate(counts[image].tolist()):
                masked = range(2 + crop * places, 2 + crop * places + count)
                errors = [-(of_patches[image, at] * logs[image, at + classes - 2]).sum() for at in masked]
                loss = loss + (self.ibot_weight * torch.stack(errors).mean() / 2 if errors else 0.0)
            losses.append(loss)
        total = torch.stack(losses)
        for crop in range(2):
            x = features[:, crop] / features[:, crop].norm(dim=-1, keepdim=True)
            total = (
                total
                - self.koleo_weight * (torch.stack([self._nearest(x, image) for image in range(len(x))]) + 1e-8).log()
            )
        return total

    def _nearest(self, x: Tensor, image: int) -> Tensor:
        """Return the distance of an image to the nearest other one of its group.

        x: features of images, of length 1, [images, features].
        """
        import torch

        begin = image - image % self.koleo_group
        others = [other for other in range(begin, begin + self.koleo_group) if other != image]
        nearest = max(others, key=lambda other: (x[image] @ x[other]).item())
        return torch.nn.functional.pairwise_distance(x[image], x[nearest], eps=1e-8)


def _spread(scores: Tensor) -> Tensor:
    """Return probabilities of rows over prototypes by three rounds of Sinkhorn-Knopp, as DINOv2 computes them."""
    q = scores.exp().T
    for _ in range(3):
        q = q / q.sum(1, keepdim=True) / q.shape[0]
        q = q / q.sum(0, keepdim=True) / q.shape[1]
    return (q * q.shape[1]).T


def dino_of(config: ModelConfig) -> DINOConfig:
    """Return the configuration of the model, which is of the task's family."""
    from vitpar.models.dino.config import DINOConfig

    config = config.unadapted
    assert isinstance(config, DINOConfig), "the task has been checked to fit the model"
    return config
