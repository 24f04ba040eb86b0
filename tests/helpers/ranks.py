"""A pool of gloo ranks, started once per world size, which runs one function after another on all ranks.

Ranks are forked from a server that has imported torch and vitpar but has no threads, so they start quickly.
"""

import ctypes
import faulthandler
import multiprocessing
import os
import signal
import socket
import time
import traceback
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from helpers.command_line import clean_environment
from vitpar.launch import World, join, leave

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["vitpar.check", "torch.profiler", "einops._torch_specific", "pytest", "hypothesis"])
MOST_THREADS = 50
_PR_SET_PDEATHSIG = 1
TIMEOUT = 1100.0  # seconds for one function; pytest's own timeout is usually shorter


class RankError(AssertionError):
    """Error of a function on a rank of the pool; the message holds that rank's traceback."""


class RankPool:
    """Pool of `size` forked processes in one process group, each with one CPU thread.

    Between functions they are stopped: every process group keeps a thread that polls 100 times a second, and the idle
    ranks of a test session took half of two cores.
    """

    def __init__(self, size: int) -> None:
        from torch.distributed import TCPStore

        self.size = size
        # This process owns the store, so that no rank has to find a free port.
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        pipes = [CONTEXT.Pipe() for _ in range(size)]
        self._ends = [end for end, _ in pipes]
        self._processes = [
            CONTEXT.Process(target=_serve, args=(rank, size, self._store.port, end), daemon=True)
            for rank, (_, end) in enumerate(pipes)
        ]
        for process in self._processes:
            process.start()

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Run ``function(device, *args, **kwargs)`` on every rank at once, and return the results in rank order.

        Raises RankError if a rank fails; the pool is closed then.

        function: importable by name, as are its arguments
        """
        self._signal(signal.SIGCONT)
        for end in self._ends:
            end.send((function, args, kwargs))
        results = []
        for rank, end in enumerate(self._ends):
            if not end.poll(TIMEOUT):
                self.close()
                raise RankError(f"rank {rank} of {self.size} did not answer within {TIMEOUT} s")
            try:
                results.append(end.recv())
            except EOFError:
                self._processes[rank].join(TIMEOUT)
                results.append((False, f"the process ended with {self._processes[rank].exitcode}"))
        failures = [(rank, text) for rank, (fine, text) in enumerate(results) if not fine]
        if failures:
            self.close()
            # a rank that lost its peer is not the cause
            rank, text = min(failures, key=lambda failure: "gloo/transport" in failure[1])
            raise RankError(f"rank {rank} of {self.size}:\n{text}")
        self._signal(signal.SIGSTOP)
        return [value for _, value in results]

    def _signal(self, number: signal.Signals) -> None:
        for process in self._processes:
            if process.pid is not None and process.is_alive():
                os.kill(process.pid, number)

    @property
    def alive(self) -> bool:
        """Return whether the pool can still run functions."""
        return all(process.is_alive() for process in self._processes)

    @property
    def tired(self) -> bool:
        """Return whether the ranks have so many threads that they slow each other down.

        Every process group keeps threads that poll. PyTorch's caches hold references to groups, so they cannot be
        freed.
        """
        tasks = Path(f"/proc/{self._processes[0].pid}/task")
        return tasks.is_dir() and len(list(tasks.iterdir())) > MOST_THREADS

    def close(self) -> None:
        """End all ranks: they see a closed pipe, and what does not leave by itself is killed."""
        self._signal(signal.SIGCONT)
        for end in self._ends:
            end.close()
        _end(self._processes)


Ranks = Callable[[int], RankPool]
"""The fixture `ranks`: a function that returns the pool of as many ranks."""


def _end(processes: Iterable[BaseProcess], patience: float = 5.0) -> None:
    """Wait for processes that should end, for `patience` seconds in all, and kill the others."""
    latest = time.monotonic() + patience
    for process in processes:
        process.join(max(latest - time.monotonic(), 0))
        process.kill()
        process.join()


def free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return str(server.getsockname()[1])


def two_ranks() -> list[dict[str, str]]:
    """Return the environments that torchrun would give to two ranks on this machine."""
    world = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    return [world | {"RANK": rank, "LOCAL_RANK": rank} for rank in "01"]


def in_forks(
    function: Callable[..., Any], environments: Iterable[dict[str, str]], *args: Any, seconds: float = 100.0
) -> list[Any]:
    """Return what ``function(*args)`` returns in a fork of the server for each environment; all run at once.

    Unlike ranks of a pool they are in no world yet. `clean_environment` is added to each environment.
    """
    forks = []
    for env in environments:
        mine, its = CONTEXT.Pipe(duplex=False)
        fork = CONTEXT.Process(target=_run_once, args=(its, clean_environment() | env, function, args))
        fork.start()
        its.close()
        forks.append((fork, mine))
    values = []
    try:
        for rank, (_, end) in enumerate(forks):
            fine, value = end.recv() if end.poll(seconds) else (False, "it did not answer")
            if not fine:
                raise RankError(f"fork {rank} of {len(forks)}:\n{value}")
            values.append(value)
    finally:
        for fork, _ in forks:
            fork.terminate()
        _end(fork for fork, _ in forks)
    return values


def exits(function: Callable[..., Any], environments: Iterable[dict[str, str]], *args: Any) -> list[tuple[int, str]]:
    """Run ``function(*args)`` as `in_forks` does, and return the exit code and the standard error of each fork."""
    with TemporaryDirectory() as folder:
        paths, forks = [], []
        for number, env in enumerate(environments):
            paths.append(Path(folder, str(number)))
            environment = clean_environment() | env
            forks.append(CONTEXT.Process(target=_run_apart, args=(paths[-1], environment, function, args)))
            forks[-1].start()
        for fork in forks:
            fork.join(200.0)
            fork.kill()
        return [(fork.exitcode, path.read_text()) for fork, path in zip(forks, paths, strict=True)]


def _run_apart(errors: Path, environment: dict[str, str], function: Callable[..., Any], args: Any) -> None:
    os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT), 2)
    os.environ.clear()
    os.environ.update(environment)
    function(*args)


def _run_once(end: Connection, environment: dict[str, str], function: Callable[..., Any], args: Any) -> None:
    os.environ.clear()
    os.environ.update(environment)
    try:
        answer = (True, function(*args))
    except BaseException:
        answer = (False, traceback.format_exc())
    end.send(answer)
    signal.pause()  # its parent ends it: others may still need its store


def _one_gloo_device() -> None:
    """Let all process groups of this process share a device of gloo: each device has a thread that polls."""
    from torch.distributed import ProcessGroupGloo, distributed_c10d

    device = ProcessGroupGloo.create_device(hostname="127.0.0.1")

    class Sharing(type):
        def __call__(cls, store: Any, rank: int, size: int, timeout: Any) -> ProcessGroupGloo:
            options = ProcessGroupGloo._Options()
            options._devices, options._timeout = [device], timeout
            return ProcessGroupGloo(store, rank, size, options)

        def __instancecheck__(cls, group: Any) -> bool:
            return isinstance(group, ProcessGroupGloo)

    class OneDevice(metaclass=Sharing):
        """A ProcessGroupGloo of that device."""

    distributed_c10d.ProcessGroupGloo = OneDevice


def _serve(rank: int, size: int, port: int, end: Connection) -> None:
    import torch

    # A stopped rank does not notice that its session has ended, but the server that forked it does.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    torch.set_num_threads(1)
    faulthandler.enable()
    os.environ |= {"OMP_NUM_THREADS": "1", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    _one_gloo_device()
    device = join(World(rank, size, rank, size, "torchrun", "127.0.0.1", port), "cpu", timeout=60.0)
    while True:
        try:
            function, args, kwargs = end.recv()
        except EOFError:
            break
        try:
            answer = (True, function(device, *args, **kwargs))
        except BaseException:
            end.send((False, traceback.format_exc()))
            os._exit(1)  # peers may be waiting for this rank: let them see a closed connection
        end.send(answer)
    leave()
