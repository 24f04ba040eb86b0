"""Worlds of processes found in a launcher's environment variables."""

from pathlib import Path

import pytest

from vitpar.errors import LaunchError
from vitpar.launch import World, find_world
from vitpar.launch.world import first_host

TORCHRUN = {
    **{"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"},
    **{"MASTER_ADDR": "node01", "MASTER_PORT": "29500"},
}
SLURM = {
    **{"SLURM_JOB_ID": "123456", "SLURM_STEP_ID": "2", "SLURM_NTASKS": "11", "SLURM_STEP_NUM_TASKS": "11"},
    **{"SLURM_PROCID": "9", "SLURM_LOCALID": "1", "SLURM_NODEID": "2", "SLURM_STEP_TASKS_PER_NODE": "4(x2),3"},
    **{"SLURM_STEP_NODELIST": "node07", "SLURM_JOB_NODELIST": "node[01-09]"},
}
OPENMPI = {
    **{"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "PMIX_NAMESPACE": "prterun-node01-77@1"},
    **{"OMPI_COMM_WORLD_LOCAL_RANK": "3", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"},
}
KUBERNETES = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456"}
"""Variables that operators of Kubernetes set for the only process of each pod."""

ONE_HOST = {"SLURM_STEP_TASKS_PER_NODE": "11", "SLURM_STEP_NODELIST": "node07", "SLURM_LOCALID": "9"}


def without(env: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in env.items() if name not in names}


@pytest.mark.parametrize(
    ("env", "world"),
    [
        (TORCHRUN, World(5, 8, 1, 4, "torchrun", "node01", 29500)),
        (TORCHRUN | {"VITPAR_REPORTS": "/tmp/x"}, World(5, 8, 1, 4, "vitpar", "node01", 29500)),
        (TORCHRUN | SLURM | OPENMPI, World(5, 8, 1, 4, "torchrun", "node01", 29500)),
        (KUBERNETES, World(1, 2, 0, 1, "environment", "job-master-0", 23456)),
        (KUBERNETES | {"MASTER_ADDR": "127.0.0.1"}, World(1, 2, 1, 2, "environment", "127.0.0.1", 23456)),
        (without(TORCHRUN, "LOCAL_RANK"), World(5, 8, 1, 4, "environment", "node01", 29500)),
        (SLURM, World(9, 11, 1, 3, "slurm", "node07", 20000 + (123456 + 2 * 1009) % 12000)),
        (SLURM | {"MASTER_ADDR": "ib7", "MASTER_PORT": "4000"}, World(9, 11, 1, 3, "slurm", "ib7", 4000)),
        (OPENMPI | SLURM | {"MASTER_PORT": "4000"}, World(3, 4, 3, 4, "openmpi", "127.0.0.1", 4000)),
        (OPENMPI | {"MASTER_ADDR": "ib7", "MASTER_PORT": "4000"}, World(3, 4, 3, 4, "openmpi", "127.0.0.1", 4000)),
        (SLURM | ONE_HOST | {"MASTER_ADDR": "ib7", "MASTER_PORT": "1"}, World(9, 11, 9, 11, "slurm", "127.0.0.1", 1)),
    ],
)
def test_world_is_found_for_each_launcher(env: dict[str, str], world: World) -> None:
    assert find_world(env) == world


def test_ranks_of_an_mpi_job_derive_one_port() -> None:
    ports = {find_world(OPENMPI | {"OMPI_COMM_WORLD_RANK": str(r)}).master_port for r in range(4)}
    assert len(ports) == 1 and 20000 <= ports.pop() < 32000


@pytest.mark.parametrize(
    "env",
    [
        {},
        {"MASTER_ADDR": "node01", "MASTER_PORT": "29500"},
        KUBERNETES | {"RANK": "0", "WORLD_SIZE": "1"},
        without(SLURM, "SLURM_STEP_ID"),  # a batch script
        SLURM | {"SLURM_STEP_ID": str(0xFFFFFFFA)},  # the interactive step of salloc
        SLURM | {"SLURM_STEP_NUM_TASKS": "1"},  # srun --pty bash in a larger job
    ],
)
def test_environment_without_a_launcher_gives_no_world(env: dict[str, str]) -> None:
    assert find_world(env) is None


@pytest.mark.parametrize(
    ("env", "message"),
    [
        (without(TORCHRUN, "WORLD_SIZE"), "WORLD_SIZE is not set although"),
        (without(TORCHRUN, "LOCAL_WORLD_SIZE"), "LOCAL_WORLD_SIZE is not set .* or unset RANK to start locally"),
        (without(TORCHRUN, "LOCAL_RANK") | {"LOCAL_WORLD_SIZE": "3"}, "LOCAL_RANK is not set .* or unset RANK to"),
        (without(KUBERNETES, "MASTER_ADDR"), "MASTER_ADDR is not set .* or unset RANK to start locally"),
        (TORCHRUN | {"RANK": "-1"}, "RANK is '-1', which is not a whole number: unset it or correct it"),
        (TORCHRUN | {"RANK": "\x1b[2J"}, r"RANK is '\\x1b\[2J', which is not a whole number"),
        *(
            (TORCHRUN | {name: value}, "torchrun gave rank .* which is impossible: start all ranks with one launcher")
            for name, value in (("RANK", "8"), ("LOCAL_RANK", "4"), ("MASTER_PORT", "65536"), ("WORLD_SIZE", "9" * 30))
        ),
        *(
            (SLURM | wrong, "SLURM_NODEID is . but SLURM_STEP_TASKS_PER_NODE .* lists . hosts?: correct them, or start")
            for wrong in ({"SLURM_NODEID": "3"}, {"SLURM_STEP_TASKS_PER_NODE": "x"})
        ),
        (OPENMPI | {"OMPI_COMM_WORLD_SIZE": "8"}, "mpirun started 8 ranks, 4 of them .* add `-x MASTER_ADDR="),
        (without(OPENMPI, "PMIX_NAMESPACE"), "add `-x MASTER_PORT=29500` to mpirun"),
    ],
)
def test_contradictory_world_is_refused(env: dict[str, str], message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        find_world(env)


def test_first_host_of_a_slurm_node_list_is_what_scontrol_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert first_host("n1") == "n1"
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LaunchError, match=r"'node\[01-03\],b' is unknown, .* set MASTER_ADDR to the host of"):
        first_host("node[01-03],b")
    (tmp_path / "scontrol").write_text(
        '#!/bin/sh\n[ "$*" = "show hostnames node[01-03],b" ] && printf "node01\\nnode02\\n"'
    )
    (tmp_path / "scontrol").chmod(0o755)
    assert first_host("node[01-03],b") == "node01"
