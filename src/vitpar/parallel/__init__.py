"""Plans applied to models: meshes, tensor, data and pipeline parallelism."""

from vitpar.parallel.model import ParallelModel
from vitpar.parallel.parallelize import parallelize
from vitpar.parallel.precision import PRECISIONS
from vitpar.strategy.execution import Communication, Execution

__all__ = ["PRECISIONS", "Communication", "Execution", "ParallelModel", "parallelize"]
