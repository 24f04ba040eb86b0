"""The frozen teacher of a distillation ([distill]): its weights, its plan, and its logits in every step."""

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from vitpar.checkpoint.index import read_class_names
from vitpar.data.classes import ClassMatch, match_classes
from vitpar.data.stream.stream_set import ImageSet
from vitpar.errors import DataError, RecipeError, StrategyError
from vitpar.launch.world_group import all_reduce_
from vitpar.models.config import ModelConfig
from vitpar.parallel import Communication
from vitpar.parallel.float8 import refuse_small
from vitpar.parallel.parallelize import parallelize_checked
from vitpar.recipe import Recipe
from vitpar.recipe.file import read_section
from vitpar.recipe.sections.input import CLASSIFY, DataSection, TaskSection
from vitpar.strategy import Plan, batch_arithmetic, validate
from vitpar.strategy.batch import smallest_microbatch
from vitpar.strategy.execution import Execution
from vitpar.strategy.freezing import parameter_names
from vitpar.strategy.stages import takes_all_of
from vitpar.strategy.support import refuse_clashes
from vitpar.tasks import Task, task_of
from vitpar.tasks.distill import Distill
from vitpar.tasks.task import StepInput
from vitpar.tasks.teacher import Teacher
from vitpar.text import divisors, shown
from vitpar.training.saving.resume import weights_folder
from vitpar.weights.folder import RECIPE, load_weights, open_weights


@dataclass(frozen=True)
class TeacherSetup:
    """A recipe's teacher, checked against the recipe, its data and its plan."""

    folder: Path
    """Folder of the weights or the checkpoint."""
    config: ModelConfig
    """Configuration of the model."""
    plan: Plan
    """Plan on the ranks of the training, with as many micro-batches as the training has, or fewer."""
    outputs: tuple[int, ...] | None = None
    """Output of the teacher for each class of the data; None to keep their order."""


def teacher_of(recipe: Recipe, config: ModelConfig, plan: Plan, data: ImageSet | None = None) -> TeacherSetup | None:
    """Return the teacher of a recipe; None if it has none.

    config: configuration of the student.
    plan: of the student, with known degrees.
    data: training set, whose classes are matched by name; None to compare their number.

    Raises DataError for weights that cannot be read, RecipeError for a teacher that does not fit, and StrategyError for
    a plan that does not.
    """
    if recipe.distill.teacher is None:
        return None
    folder, teacher = open_teacher(recipe, config)
    outputs, beside = _outputs(config, folder, teacher, data), _plan(recipe, teacher, plan)
    if recipe.stream and not takes_all_of(plan, beside, config, teacher, recipe.train.batch_size):
        raise StrategyError(
            f"distill.plan '{shown(recipe.distill.plan)}' needs streamed images on ranks that do not read them under "
            f"'{shown(plan)}': pack the data, or use the same strategy for both, without pp"
        )
    return TeacherSetup(folder, teacher, beside, outputs)


def open_teacher(recipe: Recipe, config: ModelConfig) -> tuple[Path, ModelConfig]:
    """Return folder and configuration of the teacher of a student `config`, without comparing classes and plans.

    Raises DataError for weights that cannot be read, and RecipeError for a teacher or a student that does not fit.
    """
    assert recipe.distill.teacher is not None
    task_of(recipe, config.num_classes).refuse_model(config)
    folder = Path(recipe.distill.teacher)
    if not folder.is_dir():
        raise DataError(
            f"distill.teacher '{shown(folder)}' does not exist: name a run, or a folder of weights such as one that "
            "`vitpar checkpoint import` makes"
        )
    folder = weights_folder(folder)
    teacher = open_weights(folder).config
    data = read_section(folder / RECIPE, "data", DataSection)
    task = read_section(folder / RECIPE, "task", TaskSection).name
    if teacher.input.dtype is not None or task != CLASSIFY:
        raise RecipeError(
            f"the teacher in '{folder}' was trained for task '{shown(task)}': name one that classifies images"
        )
    wanted = {"image_size": config.image_size, "channels": config.channels}
    wrong = [
        f"{name} {getattr(teacher, name)} instead of {value}"
        for name, value in wanted.items()
        if getattr(teacher, name) != value
    ]
    wrong += [
        f"{name} {getattr(data, name)} instead of {getattr(recipe.data, name)}"
        for name in ("mean", "std")
        if getattr(data, name) != getattr(recipe.data, name)
    ]
    if wrong:
        raise RecipeError(
            f"the teacher in '{folder}' takes other images than the model, with {', '.join(wrong)}: set "
            "model.image_size, data.mean and data.std to the teacher's, or name another"
        )
    if recipe.train.precision == "fp8":
        refuse_small(teacher, recipe.train.fp8_min_features)
    return folder, teacher


def _outputs(config: ModelConfig, folder: Path, teacher: ModelConfig, data: ImageSet | None) -> tuple[int, ...] | None:
    """Return the teacher's output for each class, None for the same order. Raises RecipeError for other classes."""
    names = read_class_names(folder, teacher.num_classes)
    match = ClassMatch("unnamed") if data is None else match_classes(names, data)
    if match.kind == "moved":
        return match.outputs
    if match.kind in ("other", "mixed") or teacher.num_classes != config.num_classes:
        words = match.words or f"it has {teacher.num_classes:,} for the {config.num_classes:,} of the model"
        raise RecipeError(
            f"the teacher in '{folder}' has other classes ({words}): train it on the same data, as with --weights"
        )
    return None


def _plan(recipe: Recipe, teacher: ModelConfig, student: Plan) -> Plan:
    """Return the teacher's plan beside that of the student. Raises StrategyError.

    Micro-batches are the student's where the teacher's ranks divide them, so that ranks need the same images.
    """
    plan, batch_size = recipe.distill.teacher_plan(student.world_size), recipe.train.batch_size
    try:
        parts = plan.data_parallel * smallest_microbatch(plan)
        counts = divisors(batch_arithmetic(student, batch_size).microbatches)
        fitting = [count for count in counts if batch_size % (count * parts) == 0]
        plan = validate(replace(plan, microbatches=max(fitting, default=1)), teacher, batch_size)
        refuse_clashes(plan, recipe.train.precision, bool(recipe.train.compile))
    except StrategyError as error:
        raise StrategyError(f"distill.plan '{shown(recipe.distill.plan)}': {error}") from None
    return plan


class FrozenTeacher(Teacher):
    """Teacher with weights of its own, which do not change. execution: of the student."""

    def __init__(self, setup: TeacherSetup, execution: Execution, task: Task, device: torch.device) -> None:
        assert isinstance(task, Distill), "a recipe with a teacher has this task"
        self._task, self.folder = task, setup.folder
        # On the device: indexing by a list would wait for a copy in every step.
        self._order = None if setup.outputs is None else torch.tensor(setup.outputs, device=device)
        alone = replace(execution, frozen=frozenset(parameter_names(setup.config)), communication=Communication())
        self.model = parallelize_checked(setup.config, setup.plan, alone, device)
        load_weights(self.model, setup.folder)
        self._rows = torch.tensor(self.model.output_rows(self.model.batch_size), device=device)

    def targets(self, given: StepInput) -> Tensor:
        """Return the targets of a step, with the teacher's logits for the complete batch."""
        return self._task.with_teacher(given.targets, self.logits(given.taught))

    def logits(self, images: Tensor | None) -> Tensor:
        """Return the logits of the complete batch, [batch, classes of the data], float32 or float64.

        images: this rank's images (``ParallelModel.image_rows``).
        """
        model = self.model
        outputs = model.predict(images, model.batch_size)
        assert outputs is not None, "without a pipeline every rank gives outputs"
        wide = outputs if outputs.dtype is torch.float64 else outputs.float()
        # Exactly one rank fills each row, so the sum over the ranks is exact.
        logits = wide.new_zeros(model.batch_size, wide.shape[1])
        if model.first_of_outputs:
            logits[self._rows] = wide
        all_reduce_(logits)
        return logits if self._order is None else logits[:, self._order]
