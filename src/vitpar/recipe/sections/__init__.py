"""The sections of a recipe: every setting with its type, range, default and effect.

input: [task], [model], [data], [stream], [augment]. training: [optimizer], [lr_schedule], [lora], [train], [distill],
[loss_scale].
running: [checkpoint], [faults], [parallel], [communication], [track].
"""

from vitpar.recipe.sections.base import Section
from vitpar.recipe.sections.input import (
    CLASSIFY,
    TEXT,
    AugmentSection,
    DataSection,
    ModelSection,
    StreamSection,
    TaskSection,
)
from vitpar.recipe.sections.running import (
    AUTO,
    CheckpointSection,
    CommunicationSection,
    FaultsSection,
    ParallelSection,
    TrackSection,
)
from vitpar.recipe.sections.training import (
    AdjustLr,
    DistillSection,
    Implementation,
    LoraSection,
    LossScaleSection,
    LRScheduleSection,
    OptimizerSection,
    TrainSection,
)

__all__ = [
    "AUTO",
    "CLASSIFY",
    "TEXT",
    "AdjustLr",
    "AugmentSection",
    "CheckpointSection",
    "CommunicationSection",
    "DataSection",
    "DistillSection",
    "FaultsSection",
    "Implementation",
    "LRScheduleSection",
    "LoraSection",
    "LossScaleSection",
    "ModelSection",
    "OptimizerSection",
    "ParallelSection",
    "Section",
    "StreamSection",
    "TaskSection",
    "TrackSection",
    "TrainSection",
]
