"""Launchers and process groups: from one process to a world of ranks, and back.

    world = find_world()                      # did torchrun, srun, mpirun or vitpar itself start us?
    if world is None and workers > 1:         # no: start ranks here; each runs this program again and finds its world
        return spawn(workers, ["-m", "my.module", *sys.argv[1:]], device="cpu")
    with joined(world or ALONE, "cpu") as device:
        ...                                   # torch.distributed is ready, for a world of one as well

All of it runs inside `with reporting():`, which sends a rank's error to the process that started it. Importing this
package does not import torch.
"""

from vitpar.launch.local import spawn
from vitpar.launch.process_group import in_world, join, joined, leave, share_cores
from vitpar.launch.report import finish, report_failure, reporting
from vitpar.launch.world import ALONE, World, find_world

__all__ = [
    "ALONE",
    "World",
    "find_world",
    "finish",
    "in_world",
    "join",
    "joined",
    "leave",
    "report_failure",
    "reporting",
    "share_cores",
    "spawn",
]
