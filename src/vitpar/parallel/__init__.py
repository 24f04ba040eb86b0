"""Plans applied to models: meshes, tensor, data and pipeline parallelism."""

from vitpar.parallel.data import Communication
from vitpar.parallel.model import ParallelModel
from vitpar.parallel.parallelize import parallelize
from vitpar.parallel.precision import PRECISIONS

__all__ = ["PRECISIONS", "Communication", "ParallelModel", "parallelize"]
