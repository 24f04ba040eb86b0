"""Tasks: what a training is about. Loss, metrics and predictions are known here and nowhere above.

Importing this package loads no torch.
"""

from vitpar.tasks.known import TASKS, load, task_class, task_of
from vitpar.tasks.task import LabelSet, Metric, Task

__all__ = ["TASKS", "LabelSet", "Metric", "Task", "load", "task_class", "task_of"]
