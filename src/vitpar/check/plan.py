"""Run the steps of a check under a plan, on all its ranks, and in one process on rank 0."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from vitpar.check.compare import IMAGES, LEAST, CheckResult, Comparison, compare, compare_numbers, noise_of
from vitpar.check.one_process import FROZEN, OneProcess, Trace
from vitpar.check.samples import Drawn, Pixels, Samples, draw_samples
from vitpar.data.loader import Batch
from vitpar.launch.world_group import all_reduce_, broadcast_json
from vitpar.models.config import ModelConfig, field_names
from vitpar.models.families import family_of
from vitpar.models.layers import LayeredModel
from vitpar.parallel import ParallelModel
from vitpar.recipe import Recipe, read_recipe
from vitpar.recipe.effects import OF_CLASSES, OF_IMAGES
from vitpar.recipe.machine import replace_auto_precision
from vitpar.recipe.sections.input import CLASSIFY, TEXT
from vitpar.recipe.sections.training import LossScaleSection, OptimizerSection
from vitpar.sharded import local, sharded_as
from vitpar.strategy import Plan
from vitpar.tasks import Task, task_of
from vitpar.tasks.image_input import ImageInput, local_targets
from vitpar.tasks.probe import refuse_wrong_task
from vitpar.tasks.task import StepInput
from vitpar.training.build import TrainingComponents, build
from vitpar.training.optim.norms import global_norm, multiply_
from vitpar.training.optim.optimizer import ShardedOptimizer
from vitpar.weights.folder import open_weights

LEARNING_RATE = 0.05
"""Learning rate of the SGD steps."""
LOSS_SCALE = 1024.0
"""Loss scale of fp16 on both sides: a power of two, so that scaling does not round, and too small to overflow."""
EMA_DECAY = 0.9
"""Decay of averaged weights. With a recipe's 0.9999 the change of an average in two steps would be only rounding."""
NOISY_RUNS = 3
"""Number of runs in one process with random changes of the size of rounding."""
UNCHECKED = (
    "data order, decoding, crops, flips, policies and erasing; schedules of learning rate and weight decay; "
    "evaluation; checkpoints"
)
_TEXT_MODEL = {"model.embed_dim": 48, "model.num_heads": 12, "model.depth": 4}
_MODELS: Mapping[str, Mapping[str, Any]] = {
    "mlm": {"model.name": "bert_custom", **_TEXT_MODEL},
    "span": {"model.name": "t5_custom", **_TEXT_MODEL, "model.decoder_depth": 3, "model.head_dim": 4},
    "dino": {
        "model.name": "dino_vit_nano_patch4_16",
        "model.dropout": 0.0,
        "model.options": {"local_crops": 3, "local_size": 8, "head_hidden_dim": 32, "head_bottleneck_dim": 16},
        "task.options": {"prototypes": 256, "koleo_group": 2},
    },
}
"""Settings of the default models of tasks."""
_DEFAULTS: dict[str, Any] = {
    "data.path": "unused",  # no data is read
    "train.steps": 1,
    "train.batch_size": 16,
    "train.label_smoothing": 0.1,
    "train.ema_decay": EMA_DECAY,
    "augment.mixup": 0.8,
    "augment.cutmix": 1.0,
    "augment.repeats": 2,
    "model.name": "vit_nano_patch4_16",  # 8 blocks and 12 heads, so that most plans fit it
    "model.drop_path": 0.1,
    "model.dropout": 0.1,
}


def recipe_to_check(options: Mapping[str, object] | None = None, assignments: Sequence[str] = ()) -> Recipe:
    """Return a recipe of a tiny ViT that turns on everything a check compares.

    options, assignments: settings that differ, as for `read_recipe`.

    Raises RecipeError as it does, and ModelError for an unknown model.
    """
    given = {key: value for key, value in (options or {}).items() if value is not None}
    assigned = dict(assignment.partition("=")[::2] for assignment in assignments)
    task = str(assigned.get("task.name") or given.get("task.name") or CLASSIFY)
    unused = OF_IMAGES if task in TEXT else OF_CLASSES if task != CLASSIFY else ()
    named = assigned.get("model.name") or given.get("model.name")
    usual = {**_DEFAULTS, **({} if named else _MODELS.get(task, {}))}
    known = field_names(family_of(str(named or usual["model.name"]).strip()))
    defaults = {
        key: value
        for key, value in usual.items()
        if (not key.startswith("model.") or key.removeprefix("model.") in known) and key not in unused
    }
    return read_recipe(None, {**defaults, **given}, assignments)


def check_plan(
    recipe: Recipe,
    config: ModelConfig,
    plan: Plan,
    device: torch.device,
    task: Task | None = None,
    *,
    tolerance: float | None = None,
    sgd_steps: int = 2,
    recipe_steps: int = 2,
) -> CheckResult:
    """Compare a training under `plan` with the same training in one process. Collective; equal results on all ranks.

    The first `sgd_steps` steps use plain SGD, because adaptive optimizers and clipping hide a gradient of the wrong
    scale. Then come `recipe_steps` steps of the recipe: its optimizer at its peak learning rate, clipping, average,
    label smoothing, mixing of images and repeated samples. Initial values are drawn so that no gradient vanishes.

    recipe: source of all of the above, of precision, batch size and seed.
    plan: validated against the model, `config`, and the batch.
    task: what is trained, with an independent formula of its loss; None for the recipe's, with as many labels as the
        model has outputs.
    tolerance: allowed relative error of everything; None for a multiple of the rounding noise of one process.

    Raises RecipeError as `build` does, and StrategyError for settings that clash under the plan.
    """
    recipe = replace_auto_precision(recipe, device.type)
    recipe.refuse_clashes(plan)
    task = task or task_of(recipe, config.num_classes)
    recipe, config = recipe.updated(train={"ema_decay": recipe.train.ema_decay and EMA_DECAY}), config.perturbed
    if recipe.train.precision == "fp16":
        scale_section = LossScaleSection(dynamic=False, initial_scale=LOSS_SCALE)
        recipe = recipe.model_copy(update={"loss_scale": scale_section})
    refuse_wrong_task(task, checked=True)
    samples = draw_samples(recipe, config, task, sgd_steps, recipe_steps)
    scale = LOSS_SCALE if recipe.train.precision == "fp16" else 1.0
    trained = build(recipe, config, plan, device, task)
    folder = None if trained.teacher is None else trained.teacher.folder
    weights = None if folder is None else open_weights(folder)
    mine = _under_plan(trained, task, samples, scale)

    reference: list[Trace] = []  # one run without noise, then runs with noise of different seeds
    if dist.get_rank() == 0:
        runs = (
            OneProcess(recipe, config, task, device, scale=scale, noisy=noisy, teacher=weights)
            for noisy in (None, *range(NOISY_RUNS))
        )
        reference = [run.run(samples, LEARNING_RATE) for run in runs]
    compared = _compared(trained.model, mine, reference, recipe.train.precision, tolerance)
    shown = str(plan), config.name, recipe.train.precision, recipe.train.batch_size
    return CheckResult(*shown, tuple(compared), UNCHECKED)


def _under_plan(trained: TrainingComponents, task: Task, samples: Samples, scale: float) -> Trace:
    """Run all steps under the plan, and return this rank's results."""
    model, trace = trained.model, Trace()
    every = dict(model.named_parameters())
    frozen = {name: p for name, p in every.items() if name in model.execution.frozen}
    parameters = {name: p for name, p in every.items() if name not in frozen}
    begin, before = _copies(parameters), _copies(frozen)
    model.loss_scale = scale
    sgd = OptimizerSection(name="sgd", lr=LEARNING_RATE, weight_decay=0)
    plain = ShardedOptimizer(parameters.items(), sgd)
    for step, drawn in enumerate(samples.plain, start=1):
        mine = _given(trained, task, drawn)
        x, targets, keys, sides, _ = mine
        if trained.teacher is not None:
            targets = trained.teacher.targets(mine)
        part = model.forward_backward(x, targets, keys, **sides)
        trace.numbers[f"loss of SGD step {step}"] = model.global_loss(part).item()
        if scale != 1.0:
            multiply_(plain.gradients(), 1 / scale)
        if step == 1:
            trace.tensors["gradient"] = {
                name: None if p.grad is None else p.grad.detach().clone() for name, p in parameters.items()
            }
        plain.step(LEARNING_RATE)
    trace.tensors["SGD update"] = _since(begin, parameters)
    if not samples.further:
        trace.numbers |= _changed(trained, before, frozen)
        return trace

    begin = _copies(parameters)
    if trained.ema:
        trained.ema.restart()
    source, take = trained.input(), trained.step()
    clipped = _clipped_norms(trained)
    for step, given in enumerate(samples.further, start=1):
        if isinstance(given, Pixels):
            assert isinstance(source, ImageInput), "there are pixels only for images"
            decoded = source.train_rows
            pixels = given.images[decoded] if decoded else None
            seen, size = step * model.batch_size, model.config.image_size
            batch = Batch(pixels, given.labels, given.keys, epoch=0.0, samples=seen, size=size)
            step_input = source.train_step(batch)
        else:
            step_input = _given(trained, task, given)
        done = take(step, trained.recipe.lr, *step_input)
        trace.numbers[f"loss of step {step}"] = model.global_loss(done.loss).item()
        trace.numbers[f"gradient norm of step {step}"] = done.norm.item()
        trace.numbers[f"clipped norm of step {step}"] = clipped[-1].item()
    trace.tensors["update"] = _since(begin, parameters)
    if trained.ema:
        average = trained.ema.average
        averages = {name: sharded_as(p, average[name]) for name, p in parameters.items()}
        trace.tensors["average"] = _since(begin, averages)
    trace.numbers |= _changed(trained, before, frozen)
    return trace


def _given(trained: TrainingComponents, task: Task, drawn: Drawn) -> StepInput:
    """Return the samples of a step as this rank's input."""
    model = trained.model
    rows = model.image_rows(model.batch_size) if model.takes_images else None
    taught = None if trained.teacher is None else trained.teacher.model.image_rows(model.batch_size)
    return StepInput(
        None if rows is None else drawn.inputs[rows].to(model.device),
        _targets(task, model, drawn),
        drawn.keys.to(model.device),
        {name: side.to(model.device) for name, side in drawn.sides.items()},
        None if taught is None else drawn.inputs[taught].to(model.device),
    )


def _targets(task: Task, model: ParallelModel, drawn: Drawn) -> Tensor:
    """Return the targets of a step, of all samples or of this rank's outputs as the task wants."""
    if task.teacher_config(model.config) is not None:
        return drawn.inputs.new_zeros(0)  # the teacher makes them
    if not task.LOCAL_TARGETS:
        return task.counted_targets(drawn.labels.to(model.device))
    if not model.gives_outputs:
        return drawn.inputs.new_zeros(0)
    rows = model.output_rows(model.batch_size)
    here = drawn.inputs[rows].to(model.device, model.precision.parameters)
    labels, keys = (part[rows].to(here.device) for part in (drawn.labels, drawn.keys))
    return local_targets(task, model.config, here, labels, keys)


def _clipped_norms(trained: TrainingComponents) -> list[Tensor]:
    """Return a list to which every update appends the norm of the gradients that the optimizer sees.

    Adaptive optimizers update alike for gradients of any scale, so updates do not show a wrong limit of clipping.
    """
    optimizer, seen = trained.optimizer, list[Tensor]()
    step = optimizer.step

    def recorded(lr: float, **beside: Any) -> None:
        norm, factor = global_norm(optimizer.gradients(), trained.model), beside.get("factor")
        seen.append(norm if factor is None else norm * factor)
        step(lr, **beside)

    optimizer.step = recorded  # type: ignore[method-assign]
    return seen


def _changed(
    trained: TrainingComponents, before: Mapping[str, Tensor], frozen: Mapping[str, Tensor]
) -> dict[str, float]:
    """Return the number of changed elements of frozen parameters on all ranks, if there are any such. Collective."""
    if not trained.model.execution.frozen:
        return {}
    changed = sum(int((local(p.detach()) != before[name]).sum()) for name, p in frozen.items())
    total = torch.tensor(float(changed), dtype=torch.float64, device=trained.model.device)
    all_reduce_(total)
    return {FROZEN: total.item()}


def _compared(
    model: ParallelModel, mine: Trace, reference: Sequence[Trace], precision: str, tolerance: float | None
) -> Iterator[Comparison]:
    """Yield the comparisons of all numbers and tensors. Collective.

    A copy of a shared parameter is compared with its owner in one process.

    reference: on rank 0 the runs in one process, the first without noise; empty on other ranks.
    """
    with torch.device("meta"):
        every = LayeredModel(model.config).named_parameters()
        shapes = {name: p.shape for name, p in every if name not in model.execution.frozen}
    numbers = broadcast_json([trace.numbers for trace in reference])
    least = max(LEAST[precision][0], IMAGES)
    yield from compare_numbers(mine.numbers, numbers[0], numbers[1:], least=least, tolerance=tolerance)
    for what, tensors in mine.tensors.items():
        trimmed = what in ("update", "average")  # their optimizer may be adaptive, see TRIMMED
        elements, scale = LEAST[precision]
        least_here = (max(elements, IMAGES), max(scale, IMAGES)) if trimmed else (elements, scale)
        runs = [_with_copies(_whole(trace.tensors[what]), model.config) for trace in reference]
        expected = runs[0] if runs else None
        changed = _with_copies(reference[0].parameters, model.config) if runs and what != "gradient" else None
        noise = broadcast_json(noise_of(runs[0], runs[1:], trimmed, changed) if runs else None)
        yield from compare(
            what, model, tensors, shapes, expected, noise, least=least_here, tolerance=tolerance, trimmed=trimmed
        )


def _whole(tensors: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    present = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    assert len(present) == len(tensors), "one process has every tensor"
    return present


def _with_copies(tensors: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Return the tensors of one process with those of shared parameters under the names of their copies, too."""
    return {**tensors, **{copy: tensors[owner] for copy, owner in config.shared.items() if owner in tensors}}


def _copies(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return copies of this rank's shards."""
    return {name: local(p.detach()).clone() for name, p in parameters.items()}


def _since(begin: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> dict[str, Tensor | None]:
    """Return the change of each parameter since `begin`, sharded as the parameters are."""
    return {name: sharded_as(p, local(p.detach()) - begin[name]) for name, p in parameters.items()}
