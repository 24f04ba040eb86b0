"""Components of a training, built from a recipe to train or to measure: the model, and all that a step uses."""

import hashlib
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from vitpar.data.stream.stream_set import ImageSet
from vitpar.errors import RecipeError
from vitpar.launch.world_group import all_gather_json
from vitpar.models.config import ModelConfig
from vitpar.parallel import Communication, ParallelModel
from vitpar.parallel.attention import AttentionChoice, choose_attention
from vitpar.parallel.compiling import choose_compiling
from vitpar.parallel.parallelize import parallelize_checked
from vitpar.parallel.precision import slow_here
from vitpar.recipe import Recipe
from vitpar.strategy import Plan
from vitpar.strategy.execution import Execution
from vitpar.strategy.plan_json import plan_text
from vitpar.tasks import Task, task_of
from vitpar.tasks.dino import DINO
from vitpar.tasks.input import Input
from vitpar.tasks.inputs import build_input
from vitpar.tasks.probe import refuse_wrong_task
from vitpar.tasks.teacher import SelfTeacher, Teacher
from vitpar.text import ranks, shown
from vitpar.training.faults.non_finite import NonFinite
from vitpar.training.optim.average import EMA
from vitpar.training.optim.loss_scale import LossScaler
from vitpar.training.optim.one_pass import choose_implementation
from vitpar.training.optim.optimizer import ShardedOptimizer
from vitpar.training.saving.resume import teacher_fingerprint
from vitpar.training.signals import LayerSignals
from vitpar.training.step import TrainStep, nothing
from vitpar.training.teacher import FrozenTeacher, teacher_of
from vitpar.weights.folder import fingerprint

TRAINING_DATA = "the training data"
"""Name of the training set among the data that ranks compare."""

LOCAL = ("data.path", "data.workers", "model.weights", "distill.teacher")
"""Settings that may differ between machines: the content of the files is compared instead of their paths."""


@dataclass(frozen=True)
class TrainingComponents:
    """Training components of one rank."""

    recipe: Recipe
    """Recipe with its precision resolved."""
    task: Task
    """Task that is trained."""
    model: ParallelModel
    """Model under its plan."""
    optimizer: ShardedOptimizer
    """Optimizer of this rank's shards."""
    scaler: LossScaler | None
    """Loss scale in fp16; else None."""
    non_finite: NonFinite
    """Watch for steps that are not finite."""
    ema: EMA | None
    """Average of the parameters; None if the recipe has none."""
    teacher: Teacher | None
    """Teacher, which is not trained; None without distillation."""
    warnings: tuple[str, ...]
    """Reasons why steps are slower than they could be."""

    def choose_attention(self, kept: str | None = None) -> AttentionChoice:
        """Choose the attention kernel of the recipe (``vitpar.parallel.attention.choose_attention``). Collective.

        kept: kernel of the checkpoint that the run resumes from.

        Raises RecipeError.
        """
        model, train = self.model, self.recipe.train
        shape = (model.config, model.plan, train.batch_size, model.precision, model.device)
        return choose_attention(train.attention, *shape, kept=kept)

    def input(self) -> Input:
        """Return the input of this rank. Collective. Raises ModelError for a model that takes another input."""
        return build_input(self.recipe, self.model, self.task, None if self.teacher is None else self.teacher.model)

    def step(
        self,
        after_gradients: Callable[[int], None] = nothing,
        before_update: Callable[[], None] = nothing,
        signals: LayerSignals | None = None,
    ) -> TrainStep:
        """Return the training step of these components. The arguments are those of `TrainStep`."""
        return TrainStep(
            self.model,
            self.optimizer,
            clip_grad_norm=self.recipe.train.clip_grad_norm,
            clip_by_part=self.recipe.train.clip_by_part,
            scaler=self.scaler,
            ema=self.ema,
            non_finite=self.non_finite,
            teacher=self.teacher,
            signals=signals,
            after_gradients=after_gradients,
            before_update=before_update,
        )


def execution(recipe: Recipe, config: ModelConfig, plan: Plan, compile_blocks: bool) -> Execution:
    """Return the recipe's settings for executing `plan`. Raises RecipeError for parameters that it cannot freeze."""
    train = recipe.train
    return Execution(
        batch_size=train.batch_size,
        precision=train.precision,
        reduce_dtype=train.reduce_dtype,
        seed=train.seed,
        compile=compile_blocks,
        activation_memory_budget=train.activation_memory_budget,
        communication=Communication(**recipe.communication.model_dump()),
        frozen=recipe.frozen(config),
        fp8_min_features=train.fp8_min_features,
        fp8_fast_accum=train.fp8_fast_accum,
    )


def build(
    recipe: Recipe,
    config: ModelConfig,
    plan: Plan,
    device: torch.device,
    task: Task | None = None,
    data: Mapping[str, ImageSet | None] | None = None,
    others: Mapping[str, str | None] | None = None,
) -> TrainingComponents:
    """Build the components of `recipe`, with initial values. Collective.

    recipe: with its precision resolved.
    config: ``recipe.config`` for the classes of the data.
    plan: of ``recipe.chosen``: validated against `config` and the recipe's batch, and compared with its settings.
    task: what is trained; None for the recipe's, for as many labels as the model has outputs.
    data: data sets that the training reads, by name, to compare between ranks; None for none.
    others: further facts by name, to compare between ranks; None for none.

    Raises RecipeError if ranks disagree, if the recipe compiles blocks and they cannot be compiled, or if it freezes
    parameters that do not exist.
    """
    task = task or task_of(recipe, config.num_classes)
    refuse_wrong_task(task)
    # The weights of a resumed run may be gone: its parameters are in the checkpoint.
    weights = recipe.model.weights and Path(recipe.model.weights)
    adapters = recipe.lora.weights and Path(recipe.lora.weights)
    contents = {
        f"the content of {name}": fingerprint(folder) if folder and folder.is_dir() else None
        for name, folder in (("model.weights", weights), ("lora.weights", adapters))
    }
    contents["the content of distill.teacher"] = teacher_fingerprint(recipe)
    refuse_disagreement(recipe, plan, data or {}, contents | dict(others or {}))
    train = recipe.train
    wanted = False if recipe.faults.debug_checks else train.compile  # the checks need the operators inside blocks
    compiling = choose_compiling(wanted, plan, train.precision, device)
    executed = execution(recipe, config, plan, compiling.blocks)
    setup = teacher_of(recipe, config, plan, (data or {}).get(TRAINING_DATA))
    frozen = None if setup is None else FrozenTeacher(setup, executed, task, device)
    model = parallelize_checked(config, plan, executed, device, task)
    teacher = frozen or (SelfTeacher(model, task) if isinstance(task, DINO) else None)
    implementation = choose_implementation(recipe.optimizer, train.precision, device)
    optimizer = ShardedOptimizer(
        model.named_parameters(),
        recipe.optimizer,
        matrices=config.hidden_matrices,
        layers_above=config.layers_above,
        part=config.rate_part,
        implementation=implementation.name,
    )
    scaler = LossScaler(recipe.loss_scale) if model.precision.scales_loss else None
    holder = None if teacher is None else teacher.average
    ema = EMA(model, train.ema_decay, train.ema_warmup, holder) if train.ema_decay else None
    because = compiling.because and f"blocks are not compiled: {compiling.because}"
    passes = implementation.because and f"AdamW does not run in one pass: {implementation.because}"
    warnings = tuple(filter(None, (because, passes, slow_here(train.precision, device))))
    watch = NonFinite(recipe, model, scaler)
    return TrainingComponents(recipe, task, model, optimizer, scaler, watch, ema, teacher, warnings)


def refuse_disagreement(
    recipe: Recipe, plan: Plan, data: Mapping[str, ImageSet | None], others: Mapping[str, str | None]
) -> None:
    """Raise RecipeError on all ranks, with the name and values of what differs, unless all would compute the same.

    A launcher starts the command on every machine, where files, packages and command lines may differ. Ranks that draw
    other samples or take another batch would train another model than the recipe says, without an error.

    Collective: one message of a digest per rank.

    recipe: with its precision resolved.
    plan: with known degrees.
    data: data sets that are read, by name; None for one that does not exist.
    others: further facts by name.
    """
    facts: dict[str, object] = {key: value for key, value in recipe.flat().items() if key not in LOCAL}
    for name, images in data.items():
        if images is not None:
            classes = hashlib.sha256(json.dumps(images.names_of_classes).encode()).hexdigest()
            facts |= {f"the content of {name}": images.fingerprint, f"the classes of {name}": classes}
    # The package itself stands above its parts, which do not import it.
    versions = {"vitpar's version": sys.modules["vitpar"].__version__, "torch's version": torch.__version__}
    facts |= {"the plan": plan_text(plan), **versions, **others}
    mine = {name: json.dumps(value) for name, value in facts.items()}
    digest = hashlib.sha256(json.dumps(mine, sort_keys=True).encode()).hexdigest()
    if len({*all_gather_json(digest)}) == 1:
        return
    everyone: list[dict[str, str]] = all_gather_json(mine)
    for name in dict.fromkeys(name for one in everyone for name in one):
        groups: dict[str, list[int]] = {}
        for rank, one in enumerate(everyone):
            groups.setdefault(one.get(name, "missing"), []).append(rank)
        if len(groups) > 1:
            values = " and ".join(f"{shown(value)} on {ranks(where)}" for value, where in groups.items())
            raise RecipeError(
                f"ranks disagree: {name} is {values}: give all ranks the same command, recipe, data and packages"
            )
