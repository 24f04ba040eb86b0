"""World of processes that the environment describes: the launcher that started us, our rank and the number of ranks.

| launcher | recognised by | where the ranks meet, unless MASTER_ADDR and MASTER_PORT say it |
|---|---|---|
| vitpar, torchrun | RANK, LOCAL_RANK, LOCAL_WORLD_SIZE | (they always say it) |
| environment, such as of Kubernetes operators | RANK, WORLD_SIZE | MASTER_ADDR and MASTER_PORT are needed |
| mpirun of OpenMPI | OMPI_COMM_WORLD_RANK | MASTER_ADDR is needed, a port from the job's name |
| srun of SLURM | a step of two or more tasks | the first host of the step, a port from the job's number |

Ranks on one machine that mpirun, srun or the environment describe meet on its loopback, whatever MASTER_ADDR says.

An MPI world may be nested in a SLURM job, and a torchrun world in either, so launchers are tried from the innermost
out.
"""

import os
import re
import subprocess
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from vitpar.errors import LaunchError
from vitpar.limits import MAX_RANKS
from vitpar.text import count, shown

Device = Literal["cpu", "cuda"]
Launcher = Literal["none", "vitpar", "torchrun", "environment", "openmpi", "slurm"]

REPORTS = "VITPAR_REPORTS"
"""Environment variable of workers that vitpar started itself: the folder of their error reports."""
HANDED = "handed"
"""File in that folder with the bytes that the launcher hands to its ranks."""
LOOPBACK = "127.0.0.1"
# Below the ephemeral ports of the kernel (32768 and up on Linux), so that no client socket uses one of them.
FIRST_PORT, NUM_PORTS = 20000, 12000
# SLURM numbers the batch script, the interactive shell and its other helpers from here up: they are no steps of srun.
FIRST_SPECIAL_STEP = 0xFFFFFFF0


@dataclass(frozen=True)
class World:
    """Place of this process among all. Raises LaunchError for numbers that are impossible."""

    rank: int
    """Rank of this process among all."""
    size: int
    """Number of ranks."""
    local_rank: int
    """Rank among those of this machine."""
    local_size: int
    """Number of ranks on this machine."""
    launcher: Launcher
    """Launcher of the processes."""
    master_addr: str = LOOPBACK
    """Host where the ranks meet. Unused in a world of one."""
    master_port: int = 0
    """Port where the ranks meet. Unused in a world of one."""

    def __post_init__(self) -> None:
        fits = 0 <= self.rank < self.size <= MAX_RANKS and 0 <= self.local_rank < self.local_size <= self.size
        if not fits or not 0 <= self.master_port < 65536:
            raise LaunchError(
                f"{self.launcher} gave rank {self.rank} of {self.size}, local rank {self.local_rank} of "
                f"{self.local_size} and port {self.master_port}, which is impossible: start all ranks with one "
                f"launcher, at most {MAX_RANKS:,}, or correct its variables"
            )

    @property
    def meets_at(self) -> str:
        """Address where the ranks meet, for messages."""
        return f"{self.master_addr}:{self.master_port}"

    @property
    def single_machine(self) -> bool:
        """Whether every rank runs on this machine."""
        return self.local_size == self.size

    @property
    def on_loopback(self) -> bool:
        """Whether rank 0 listens on loopback only.

        True if all ranks are on its machine and rank 0 hosts the store: torchrun and vitpar host it for their ranks.
        """
        return self.launcher in ("environment", "openmpi", "slurm") and self.size > 1 and self.single_machine


ALONE = World(rank=0, size=1, local_rank=0, local_size=1, launcher="none")
"""World of a single process that no launcher started."""


def find_world(environ: Mapping[str, str] | None = None) -> World | None:
    """Return the world that `environ` describes; None if no launcher started us.

    environ: environment variables; None for os.environ.

    Returns None in a SLURM job without `srun`, and in a step of one task (`srun --pty bash`): local workers may be
    started there. Raises LaunchError if variables are missing or contradict each other.
    """
    env = os.environ if environ is None else environ
    if "RANK" in env or "LOCAL_RANK" in env:
        return _from_environment(env)
    if "OMPI_COMM_WORLD_RANK" in env:
        return _from_openmpi(env)
    if _slurm_step(env) is not None and _slurm_tasks(env) > 1:
        return _from_slurm(env)
    return None


def _from_environment(env: Mapping[str, str]) -> World | None:
    """Return the world that vitpar, torchrun or an operator of Kubernetes describes.

    Operators do not say which ranks share a machine: all do if MASTER_ADDR is loopback, LOCAL_WORLD_SIZE neighbours if
    it is set, else none. None for a single process of an operator, which may start local workers.
    """
    rank, size = _integer(env, "RANK"), _integer(env, "WORLD_SIZE")
    launcher: Launcher = "vitpar" if REPORTS in env else "torchrun"
    if launcher == "vitpar" or {"LOCAL_RANK", "LOCAL_WORLD_SIZE"} <= env.keys():
        local_rank, local_size = _integer(env, "LOCAL_RANK"), _integer(env, "LOCAL_WORLD_SIZE")
    elif (rank, size) == (0, 1):
        return None
    else:
        launcher, (local_rank, local_size) = "environment", _place_on_machine(env, rank, size)
    address, port = _text(env, "MASTER_ADDR"), _integer(env, "MASTER_PORT")
    return World(rank, size, local_rank, local_size, launcher, address, port)


def _place_on_machine(env: Mapping[str, str], rank: int, size: int) -> tuple[int, int]:
    """Return local rank and local size of a rank from variables that do not have both."""
    address = _text(env, "MASTER_ADDR")
    if address in ("localhost", "::1") or address.startswith("127."):
        return rank, size
    if "LOCAL_WORLD_SIZE" in env and not size % max(1, _integer(env, "LOCAL_WORLD_SIZE")):
        local_size = max(1, _integer(env, "LOCAL_WORLD_SIZE"))
        return rank % local_size, local_size
    if "LOCAL_RANK" in env or "LOCAL_WORLD_SIZE" in env:
        missing = "LOCAL_RANK" if "LOCAL_WORLD_SIZE" in env else "LOCAL_WORLD_SIZE"
        raise LaunchError(
            f"{missing} is not set although RANK is, so the ranks of this machine are unknown: set it for each rank, "
            "start the ranks with torchrun, or unset RANK to start locally"
        )
    return 0, 1


def _from_openmpi(env: Mapping[str, str]) -> World:
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    rank, size, local_rank, local_size = (_integer(env, f"OMPI_COMM_WORLD_{name}") for name in names)
    if size != local_size and not env.get("MASTER_ADDR"):
        raise LaunchError(
            f"mpirun started {size} ranks, {local_size} of them on this machine, without a MASTER_ADDR: "
            f"add `-x MASTER_ADDR=<host of rank 0>` to mpirun"
        )
    job = env.get("PMIX_NAMESPACE") or env.get("OMPI_MCA_ess_base_jobid")
    if not job and not env.get("MASTER_PORT"):
        raise LaunchError("mpirun set no job ID, so no port can be chosen: add `-x MASTER_PORT=29500` to mpirun")
    address = LOOPBACK if size == local_size else env["MASTER_ADDR"]
    return World(rank, size, local_rank, local_size, "openmpi", address, _port(env, zlib.crc32((job or "").encode())))


def _from_slurm(env: Mapping[str, str]) -> World:
    size, local_size, step = _slurm_tasks(env), _slurm_tasks_here(env), _slurm_step(env)
    assert step is not None
    address = LOOPBACK if local_size == size else env.get("MASTER_ADDR")
    address = address or first_host(env.get("SLURM_STEP_NODELIST") or _text(env, "SLURM_JOB_NODELIST"))
    port = _port(env, _integer(env, "SLURM_JOB_ID") + 1009 * step)  # steps of a job may run at the same time
    rank, local_rank = _integer(env, "SLURM_PROCID"), _integer(env, "SLURM_LOCALID")
    return World(rank, size, local_rank, local_size, "slurm", address, port)


def _slurm_step(env: Mapping[str, str]) -> int | None:
    """Return the number of our srun step; None in a batch script, in a shell of salloc, or without SLURM."""
    name = "SLURM_STEP_ID" if "SLURM_STEP_ID" in env else "SLURM_STEPID"
    if name not in env:
        return None
    step = _integer(env, name)
    return step if step < FIRST_SPECIAL_STEP else None


def _slurm_tasks(env: Mapping[str, str]) -> int:
    """Return the tasks of the step. A step may be smaller than its job, so its own variable takes precedence."""
    return _integer(env, "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in env else "SLURM_NTASKS")


def _slurm_tasks_here(env: Mapping[str, str]) -> int:
    """Return this machine's tasks of the step, from a list by machine such as `4(x2),3` or the number requested."""
    listing = env.get("SLURM_STEP_TASKS_PER_NODE")
    if not listing:
        return _integer(env, "SLURM_NTASKS_PER_NODE")
    counts = re.findall(r"([0-9]{1,5})(?:\(x([0-9]{1,5})\))?", listing)
    tasks = [int(number) for number, machines in counts for _ in range(int(machines or 1))]
    node = _integer(env, "SLURM_NODEID") if len(tasks) > 1 else 0
    if node >= len(tasks):
        raise LaunchError(
            f"SLURM_NODEID is {node} but SLURM_STEP_TASKS_PER_NODE '{shown(listing)}' lists "
            f"{count(len(tasks), 'host')}: correct them, or start the ranks with srun"
        )
    return tasks[node]


def first_host(listing: str) -> str:
    """Return the first host of a SLURM node list such as `n[01-03,7],b2`, as `scontrol` expands it.

    Raises LaunchError where there is no scontrol, as in a container.
    """
    if not set(listing) & set("[,"):
        return listing
    try:
        hosts = subprocess.run(["scontrol", "show", "hostnames", listing], capture_output=True, text=True).stdout
    except OSError:
        hosts = ""
    if not hosts:
        raise LaunchError(
            f"the first host of the SLURM node list '{shown(listing)}' is unknown, since `scontrol show hostnames` "
            "does not answer here: set MASTER_ADDR to the host of rank 0"
        )
    return hosts.split()[0]


def _port(env: Mapping[str, str], seed: int) -> int:
    """Return MASTER_PORT if it is set, else a port that every rank of the job derives alike."""
    return _integer(env, "MASTER_PORT") if env.get("MASTER_PORT") else FIRST_PORT + seed % NUM_PORTS


def _text(env: Mapping[str, str], name: str) -> str:
    if not env.get(name):
        raise LaunchError(
            f"{name} is not set although other variables of a launcher are: start the ranks with torchrun, srun or "
            f"mpirun, or set {name} for each of them{', or unset RANK to start locally' if 'RANK' in env else ''}"
        )
    return env[name]


def _integer(env: Mapping[str, str], name: str) -> int:
    text = _text(env, name)
    if not text.isascii() or not text.isdecimal():
        raise LaunchError(f"{name} is '{shown(text)}', which is not a whole number: unset it or correct it")
    return int(text[:20])
