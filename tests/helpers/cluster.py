"""Hosts on one machine: network namespaces on a bridge, with processes, cuts of their links, and launchers.

    ctl 10.203.78.1 (bridge) ──┬── n1 10.203.78.11
                               └── n2 10.203.78.12

Each host has its own network, loopback, host name and /etc/hosts. Files are shared, as on a cluster. Needs root.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from helpers.command_line import clean_environment

HOSTS = ("n1", "n2")
ADDRESSES = {"ctl": "10.203.78.1", "n1": "10.203.78.11", "n2": "10.203.78.12"}
# /sys stays that of the machine, unlike with `ip netns exec`: slurmd finds no control groups otherwise.
ON = """#!/bin/bash
# on HOST COMMAND…: become the command, on a host
host=$1; shift
exec nsenter --net=/run/netns/{prefix}$host unshare --uts --mount bash -c \\
    'hostname '$host'; mount --bind {folder}/hosts /etc/hosts; exec "$@"' _ "$@"
"""
RSH = """#!/bin/bash
# rsh [OPTIONS] HOST COMMAND…: what mpirun uses in place of ssh
while [ "${{1#-}}" != "$1" ]; do shift; done
host=$1; shift
exec {folder}/on $host bash -c "$*"
"""


class Cluster:
    """Two hosts and their switch `ctl`. `close` ends all their processes and removes them.

    Skips the test where network namespaces are not permitted.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for path in Path("/run/netns").glob("vp*-ctl"):  # of a killed test session
            if not Path("/proc", pid := path.name[2:-4]).exists():
                _remove(f"vp{pid}-")
        self.prefix = f"vp{os.getpid()}-"
        folder.mkdir(parents=True)
        (folder / "hosts").write_text("".join(f"{ip} {name}\n" for name, ip in ADDRESSES.items()))
        with (folder / "hosts").open("a") as hosts:
            hosts.write("127.0.0.1 localhost\n")
        for name, text in (("on", ON), ("rsh", RSH)):
            (folder / name).write_text(text.format(folder=folder, prefix=self.prefix))
            (folder / name).chmod(0o755)
        try:
            self._connect()
        except BaseException:
            self.close()
            raise

    def _connect(self) -> None:
        if os.getuid() != 0:
            pytest.skip("network namespaces need root")
        for name in ("ip", "nsenter", "unshare"):
            if shutil.which(name) is None:
                pytest.skip(f"{name} is not installed")
        try:
            for host in ADDRESSES:
                ip(f"netns add {self.prefix}{host}")
                self.ip(host, "link set lo up")
            self.ip("ctl", "link add eth0 type bridge")
            for host in HOSTS:
                self.ip("ctl", f"link add {host} type veth peer name eth0 netns {self.prefix}{host}")
                self.ip("ctl", f"link set {host} master eth0 up")
            for host, address in ADDRESSES.items():
                self.ip(host, f"addr add {address}/24 dev eth0")
                self.ip(host, "link set eth0 up")
            subprocess.run(self.on("n1", "true"), check=True, capture_output=True, text=True)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces are not permitted here: {error.stderr.strip()}")

    def ip(self, host: str, command: str) -> None:
        """Run a command of iproute2's ip on a host."""
        ip(f"-n {self.prefix}{host} {command}")

    def on(self, host: str, *command: str) -> list[str]:
        """Return the command line that runs a command on a host. Its process becomes the command's."""
        return [str(self.folder / "on"), host, *command]

    def start(self, host: str, command: Sequence[str], place: Path, **variables: str) -> "subprocess.Popen[str]":
        """Start a command on a host, in the folder `place`, with its output in pipes."""
        return subprocess.Popen(
            self.on(host, *command),
            cwd=place,
            env=self.environment() | variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )

    def environment(self) -> dict[str, str]:
        """Return the environment of commands: vitpar on the CPU, with gloo on the link."""
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"], "/usr/sbin", "/sbin"])
        return clean_environment() | {"PATH": path, "PYTHON": sys.executable, "GLOO_SOCKET_IFNAME": "eth0"}

    def cut(self, host: str) -> None:
        """Cut the link of a host. Neither end is notified."""
        # Not `link set down`: the host's end would lose its carrier, as it does not where a switch is in between.
        self.ip("ctl", f"link set {host} nomaster")

    def connect(self, host: str) -> None:
        """Restore the link of a host."""
        self.ip("ctl", f"link set {host} master eth0")

    def pids(self, host: str) -> list[int]:
        """Return the processes of a host."""
        return _pids(self.prefix + host)

    def clear(self) -> None:
        """End all processes of the hosts."""
        _clear(self.prefix)

    def close(self) -> None:
        """End all processes of the hosts and remove them."""
        _remove(self.prefix)


def _remove(prefix: str) -> None:
    _clear(prefix)
    for host in ADDRESSES:
        subprocess.run(["ip", "netns", "del", prefix + host], capture_output=True)


def _clear(prefix: str) -> None:
    end = time.monotonic() + 10
    while (left := [pid for host in ADDRESSES for pid in _pids(prefix + host)]) and time.monotonic() < end:
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)


def _pids(namespace: str) -> list[int]:
    """Return the processes in a network namespace."""
    try:
        wanted = os.stat(f"/run/netns/{namespace}").st_ino
    except OSError:
        return []
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if (path / "cmdline").read_bytes() and os.stat(path / "ns" / "net").st_ino == wanted:
                found.append(int(path.name))
    return found


def ip(command: str) -> None:
    subprocess.run(["ip", *command.split()], check=True, capture_output=True, text=True)


def last_step(run_dir: Path) -> int:
    """Return the last step in a run's metrics; 0 if there is none."""
    rows = metrics(run_dir)
    return max((row["step"] for row in rows), default=0)


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Return the complete rows of a run's metrics.jsonl."""
    try:
        text = (run_dir / "metrics.jsonl").read_text()
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in text.splitlines() if line.endswith("}")]


def until(condition: Callable[[], Any], seconds: float = 400, what: Callable[[], str] = str) -> None:
    """Wait for a condition. Fails after some seconds with what `what` returns."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, what()
        time.sleep(0.1)


def ended(process: "subprocess.Popen[str]", seconds: float = 400) -> tuple[int, str]:
    """Wait for a process. Return its exit code and its output and errors together."""
    out, err = process.communicate(timeout=seconds)
    return process.returncode, out + err


def recipe(folder: Path, settings: Mapping[str, object]) -> None:
    """Write recipe.toml."""
    (folder / "recipe.toml").write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in settings.items()))
