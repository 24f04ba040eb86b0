"""Sections that never change the result of a run: [checkpoint], [faults], [parallel], [communication], [track]."""

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any, Literal, Self, get_args

from pydantic import Field, field_validator

from vitpar.errors import RecipeError
from vitpar.intervals import EPOCH, Interval
from vitpar.limits import MAX_BLOCKS, MAX_COUNT
from vitpar.object_store import ObjectPath
from vitpar.recipe.sections import Section
from vitpar.strategy import Plan
from vitpar.text import either, shown

AUTO = "auto"
"""Value of `parallel.mesh` for which `vitpar train` searches the plan."""
TrackerName = Literal["tensorboard", "wandb", "trackio"]
"""Name of a tracker, which is also its package, and vitpar's extra that installs it."""


class CheckpointSection(Section):
    """When checkpoints are saved, and which of them are kept."""

    every: Interval = EPOCH
    """Interval between checkpoints, also in minutes; 0 for never."""
    first: bool = False
    """Whether one is saved after step 1 too, which shows early if the folder cannot be written."""
    keep: int = Field(2, ge=0, le=MAX_COUNT)
    """Number of newest checkpoints to keep; 0 for all."""
    keep_every_steps: int | None = Field(None, ge=1, le=MAX_COUNT)
    """Also keep checkpoints whose step is a multiple of this."""
    keep_best: bool = False
    """Also save and keep the checkpoint of the evaluation with the best top-1."""
    asynchronous: bool = True
    """Whether training continues while files are written, which takes a copy of each rank's state in host memory."""
    copy_to: str | None = None
    """Folder in object storage, s3://BUCKET/FOLDER, for copies of the run's records, its checkpoints and its final
    weights; none if unset."""

    @field_validator("copy_to")
    @classmethod
    def _is_in_object_storage(cls, name: str | None) -> str | None:
        return name and str(ObjectPath.parse(name))

    @property
    def never(self) -> bool:
        """Whether no checkpoints are wanted."""
        return not self.every.number and not self.keep_best and not self.first

    def kept(self, steps: Sequence[int], best: int | None) -> set[int]:
        """Return which checkpoints in `steps`, oldest first, to keep. best: step of the best evaluation."""
        steps = [step for step in steps if step != best]
        multiples = {step for step in steps if self.keep_every_steps and step % self.keep_every_steps == 0}
        return multiples | set(steps[-self.keep :]) | ({best} if best is not None else set())


class FaultsSection(Section):
    """Reaction to faults."""

    non_finite: Literal["stop", "skip"] = "stop"
    """Reaction to a loss or gradient that is infinite or NaN: stop, or skip the update on all ranks. To skip, the host
    waits for the device at every step."""
    max_skipped: int = Field(10, ge=1, le=MAX_COUNT)
    """Updates in a row that may be skipped."""
    hang_minutes: float = Field(10.0, ge=0, le=1_000_000)
    """Minutes after which a step, evaluation batch or checkpoint counts as hung and ends the run; 0 for never."""
    debug_checks: bool = False
    """Whether the state of the run and its gradients are checked, and replicas compared, at every step (slow)."""


class ParallelSection(Section):
    """The plan: mesh, schedule, micro-batches and the split of blocks into pipeline stages."""

    mesh: str = "dp1"
    """Strategy string such as pp2xtp2xdp2 (docs/strategies.md), a plan.json, or auto to search it in `vitpar train`."""
    fallback_meshes: tuple[str, ...] = Field((), max_length=32)
    """Strategies to try in turn if `mesh` does not fit the ranks, the model or the batch."""
    schedule: str = "1f1b"
    """Pipeline schedule: gpipe, 1f1b, interleaved1f1b, interleavedzerobubble, zbvzerobubble or dualpipev."""
    virtual_stages: int = Field(1, ge=1)
    """Pipeline stages of a rank: 2 or more with interleaved schedules, 2 with zbvzerobubble and dualpipev."""
    microbatches: int | None = Field(None, ge=1)
    """Number of micro-batches of a step; as many as the pipeline needs if unset, 1 without one."""
    microbatch_size: int | None = Field(None, ge=1)
    """Images of a rank's micro-batch, instead of `microbatches`."""
    split: str | tuple[int, ...] = "even"
    """Blocks of each stage: even, balanced (by cost), or their numbers, such as [5, 7]."""

    @classmethod
    def of(cls, plan: Plan) -> Self:
        """Return the settings that make `plan`, of a pipeline only where it has one."""
        given: dict[str, Any] = {"mesh": str(plan), "microbatches": plan.microbatches or 1}
        if plan.pipeline_degree > 1:
            given |= {"schedule": plan.schedule, "split": plan.split}
            given |= {"virtual_stages": plan.virtual_stages} if plan.virtual_stages > 1 else {}
        return cls(**given)


class CommunicationSection(Section):
    """When gradients and gathered parameters are sent."""

    bucket_cap_mb: float | None = Field(None, gt=0)
    """MiB of gradients of unsharded layers that share an all-reduce; 4 if unset."""
    prefetch: int | None = Field(None, ge=0, le=MAX_BLOCKS)
    """Number of layers by which sharded parameters are gathered ahead; FSDP2's own choice if unset."""
    reshard_after_forward: bool | None = None
    """Whether sharded layers free gathered parameters after forward; if unset, not under a pipeline nor in the head."""
    reduce_every_microbatch: bool | None = None
    """Whether sharded layers reduce gradients at every micro-batch, not only at the last; no if unset."""


class TrackSection(Section):
    """Experiment trackers, which get what the run logs (docs/trackers.md)."""

    trackers: tuple[TrackerName, ...] = ()
    """Trackers of the run; each needs its package (`pip install -e '.[tensorboard]'`)."""
    project: str = Field("vitpar", min_length=1, max_length=128)
    """Project of the run in W&B and trackio."""
    name: str | None = Field(None, min_length=1, max_length=128)
    """Name of the run in W&B and trackio; that of its folder if unset."""
    wandb_mode: Literal["offline", "online"] = "offline"
    """Whether W&B only writes to the run's folder, for `wandb sync`, or sends to its server."""

    @field_validator("trackers")
    @classmethod
    def _are_different(cls, names: tuple[TrackerName, ...]) -> tuple[TrackerName, ...]:
        repeated = next((name for name in names if names.count(name) > 1), None)
        if repeated is not None:
            raise ValueError(f"track.trackers names '{repeated}' twice: keep one")
        return names


def refuse_missing(trackers: Sequence[str]) -> None:
    """Raise RecipeError for the first tracker that is unknown or whose package is not installed. Imports none."""
    for name in trackers:
        if name not in get_args(TrackerName):
            raise RecipeError(f"unknown tracker '{shown(name)}': use {either(get_args(TrackerName))}")
        try:
            spec = find_spec(name)
        except ValueError:  # a module without a spec
            spec = None
        # A folder of this name, such as the one that W&B writes, is a namespace package without an origin.
        if spec is None or spec.origin is None:
            raise RecipeError(f"the package of the tracker '{name}' is not installed: pip install -e '.[{name}]'")
