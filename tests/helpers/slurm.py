"""A SLURM cluster on the hosts of `helpers.cluster`: munge and slurmctld on ctl, slurmd on n1 and n2.

Nothing of it is outside its folder: configuration, keys, sockets, logs and state.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from helpers.cluster import ADDRESSES, HOSTS, Cluster, until

CONFIGURATION = """
ClusterName=vitpar
SlurmctldHost=ctl({ctl})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=1,sched_min_interval=0,bf_interval=1
SlurmdTimeout=15
KillWait=120
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
SlurmdParameters=config_overrides
GresTypes=gpu
NodeName=n[1-2] NodeAddr={nodes} CPUs=4 RealMemory=1000 Gres=gpu:1 State=UNKNOWN
PartitionName=low Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=150
PartitionName=high Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""


class Slurm:
    """SLURM on the hosts of a cluster, which ends with them. Skips the test where it is not installed."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster, folder = cluster, cluster.folder / "slurm"
        for name in ("munged", "slurmctld", "slurmd", "srun"):
            if shutil.which(name, path=cluster.environment()["PATH"]) is None:
                pytest.skip(f"{name} is not installed: run tests/clusters/install.sh as root")
        for path in (folder, folder / "state", *(folder / f"spool-{host}" for host in HOSTS)):
            path.mkdir(mode=0o755)
        (folder / "munge.key").write_bytes(os.urandom(1024))
        (folder / "munge.key").chmod(0o400)
        nodes = ",".join(ADDRESSES[host] for host in HOSTS)
        (folder / "slurm.conf").write_text(CONFIGURATION.format(folder=folder, ctl=ADDRESSES["ctl"], nodes=nodes))
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        (folder / "gres.conf").write_text("Name=gpu File=/dev/null\n")
        self.folder = folder
        self._start(
            "ctl",
            "munged",
            "--foreground",
            "--force",
            f"--socket={folder}/munge.socket",
            f"--key-file={folder}/munge.key",
            f"--log-file={folder}/munge.log",
            f"--pid-file={folder}/munge.pid",
            f"--seed-file={folder}/munge.seed",
        )
        until((folder / "munge.socket").exists, what=lambda: self._log("munged"))
        self._start("ctl", "slurmctld", "-D")
        for host in HOSTS:
            self._start(host, "slurmd", "-N", host, "-D")
        until(lambda: "idle 2" in self.command("sinfo", "-h", "-o", "%t %D"), what=self._logs)

    def _start(self, host: str, *command: str) -> None:
        with (self.folder / f"{command[0]}-{host}.out").open("wb") as log:
            subprocess.Popen(
                self.cluster.on(host, *command),
                env=self.environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def environment(self) -> dict[str, str]:
        return self.cluster.environment() | {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def _log(self, name: str) -> str:
        return "".join(path.read_text() for path in self.folder.glob(f"{name}*.out"))

    def _logs(self) -> str:
        return "".join(path.read_text()[-2000:] for path in sorted(self.folder.glob("*.out")))

    def command(self, *words: str, place: Path | None = None) -> str:
        """Run one of SLURM's commands on ctl, and return its output, with its errors."""
        done = subprocess.run(
            self.cluster.on("ctl", *words),
            cwd=place,
            env=self.environment(),
            capture_output=True,
            text=True,
            timeout=400,
        )
        return done.stdout + done.stderr

    def submit(self, place: Path, script: Path, options: Sequence[str], *words: str) -> str:
        """Submit a script with options of sbatch and words for the script, and return the job's number."""
        said = self.command("sbatch", "--parsable", *options, str(script), *words, place=place)
        assert re.fullmatch(r"\d+\n", said), said
        return said.strip()

    def job(self, number: str) -> dict[str, str]:
        """Return what SLURM says of a job."""
        said = self.command("scontrol", "show", "job", "-o", number)
        return dict(word.split("=", 1) for word in said.split() if "=" in word)
