"""Launching worlds of processes: found or spawned, and ended with one error and without orphans."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from helpers.killed_runs import alive
from vitpar.errors import LaunchError
from vitpar.launch import ALONE, World, join, leave, local, report_failure, spawn

# Program of the ranks. It imports torch, which takes seconds, only if the test needs torch.distributed.
PROGRAM = '''
import os, signal, subprocess, sys, time
from pathlib import Path
from vitpar.errors import FaultError, UserError
from vitpar.launch import find_world, join, leave, reporting

def stuck():
    """Hangs, deaf to SIGTERM, with a child of its own."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)"])
    Path(sys.argv[2], f"pids{world.rank}.part").write_text(f"{os.getpid()} {child.pid}")
    Path(sys.argv[2], f"pids{world.rank}.part").rename(Path(sys.argv[2], f"pids{world.rank}"))
    time.sleep(120)

def reduced():
    import torch, torch.distributed as dist
    total = torch.tensor([world.rank + 1.0])
    dist.all_reduce(total)
    return total.item()

def fail():
    """Ends badly, once rank 0 is stuck."""
    while world.size > 1 and not Path(sys.argv[2], "pids0").exists():
        time.sleep(0.01)
    if way == "crash":
        raise RuntimeError("the answer is not 42")
    if way == "user":
        raise UserError("batch 7 does not divide by 2: use batch 8")
    if way == "fault":
        raise FaultError("rank 1 did not respond")
    if way == "lost":
        raise ConnectionError("Connection closed by peer")
    print("loading layer 3")
    if way == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if way == "aborted":
        print("malloc(): unaligned tcache chunk detected")
        deep(30)
    sys.exit(3)

def deep(frames):
    """Abort with a long stack."""
    deep(frames - 1) if frames else os.abort()

with reporting():
    world = find_world()
    way, last = sys.argv[1], world.rank == world.size - 1
    if way == "finished":
        import atexit
        from vitpar.launch import finish
        atexit.register(os.abort)
        print("done")
        finish(0 if last else 75)
    if way == "failed":
        import atexit
        atexit.register(os.abort)
        raise RuntimeError("the only cause")
    if way == "sum":
        import torch
        print("device", join(world, "cpu", timeout=60), flush=True)
        line = f"{world.launcher} {world.rank}/{world.size} {reduced()} {os.environ['OMP_NUM_THREADS']}"
        Path(sys.argv[2], f"sum{world.rank}").write_text(line)
        leave()
    elif way == "collective":
        join(world, "cpu", timeout=60)
        reduced()
        if last and sys.argv[3] == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if last:
            try:
                raise RuntimeError("the true cause")
            finally:
                leave()  # the peers lose their connection before the error is known
                time.sleep(0.1)
        reduced()
    elif way == "stuck" or not last:
        stuck()
    else:
        fail()
'''


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove launcher variables from the environment for the test."""
    launchers = re.compile(r"(SLURM|OMPI|PMIX|MASTER)_.*|(LOCAL_)?(RANK|WORLD_SIZE)|OMP_NUM_THREADS")
    for name in filter(launchers.fullmatch, list(os.environ)):
        monkeypatch.delenv(name)


@pytest.fixture
def program(tmp_path: Path) -> list[str]:
    """Return the command that runs PROGRAM, without its own arguments."""
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return [str(path)]


def parent(num_workers: int, *argv: str, patient: bool = False) -> subprocess.Popen[str]:
    """Start a separate process that spawns `num_workers` ranks."""
    call = f"spawn({num_workers}, sys.argv[1:], patient={patient})"
    code = f"import sys; from vitpar.launch import spawn; sys.exit({call})"
    return subprocess.Popen([sys.executable, "-c", code, *argv], stderr=subprocess.PIPE, text=True)


def stuck_pids(folder: Path, ranks: int) -> list[int]:
    """Return the process ids of `ranks` stuck ranks and their children, once all have started."""
    files = [folder / f"pids{rank}" for rank in range(ranks)]
    wait_until(lambda: all(file.exists() for file in files))
    return [int(pid) for file in files for pid in file.read_text().split()]


def wait_until(condition) -> None:
    """Wait up to 30 seconds for `condition`, then fail."""
    for _ in range(3000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("waited 30 seconds in vain")


# Spawned worlds


def test_spawned_ranks_reduce_and_share_the_cores(program: list[str], tmp_path: Path, capfd) -> None:
    assert spawn(2, [*program, "sum", str(tmp_path)]) == 0
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    for rank in range(2):
        assert (tmp_path / f"sum{rank}").read_text() == f"vitpar {rank}/2 3.0 {threads}"
    assert capfd.readouterr().out == "device cpu\n", "rank 0 writes to the terminal, the others do not"
    given = "import os; os._exit(os.environ['OMP_NUM_THREADS'] != '7')"
    assert spawn(1, ["-c", given], env={"OMP_NUM_THREADS": "7"}) == 0, "the user's number is kept"


@pytest.mark.slow
def test_killed_rank_is_reported_and_its_peers_are_not(program: list[str], capfd) -> None:
    assert spawn(2, [*program, "collective", "-", "kill"]) == 1
    assert capfd.readouterr().err == "rank 1 was killed by SIGKILL (out of memory?)\n"


@pytest.mark.slow
def test_cause_is_reported_even_if_a_peer_fails_first(program: list[str], capfd) -> None:
    assert spawn(2, [*program, "collective", "-", "raise"]) == 1
    error = capfd.readouterr().err
    assert error.startswith("rank 1 failed: RuntimeError: the true cause\nTraceback (most recent call last):\n")
    assert error.count("the true cause") == 2, "once in the headline, once in the line of source"
    assert "Connection closed" not in error


@pytest.mark.parametrize(
    ("way", "code", "message"),
    [
        (
            "crash",
            1,
            r"rank 1 failed: RuntimeError: the answer is not 42\nTraceback .*\n    raise RuntimeError\(.*\)\n",
        ),
        ("user", 2, r"error: batch 7 does not divide by 2: use batch 8\n"),
        ("fault", 1, r"error: rank 1 did not respond\n"),
        ("killed", 1, r"rank 1 was killed by SIGKILL \(out of memory\?\); its last output:\n  loading layer 3\n"),
        (
            "aborted",
            1,
            r"rank 1 was killed by SIGABRT; its last output:\n  loading layer 3\n"
            r"  malloc\(\): unaligned tcache chunk detected\n  Fatal Python error: Aborted\n(  .*\n){9}",
        ),
        ("exit", 3, r"rank 1 ended with exit code 3; its last output:\n  loading layer 3\n"),
        ("lost", 1, r"rank 1 failed: ConnectionError: Connection closed by peer\nTraceback .*"),
    ],
)
def test_failure_ends_all_ranks_and_is_shown_once(
    way: str, code: int, message: str, program: list[str], tmp_path: Path, capfd
) -> None:
    assert spawn(2, [*program, way, str(tmp_path)]) == code
    assert re.fullmatch(message, capfd.readouterr().err, re.DOTALL)
    pids = stuck_pids(tmp_path, 1)
    wait_until(lambda: not alive(pids))


def test_rank_0_reports_errors_like_other_ranks(program: list[str], capfd, monkeypatch: pytest.MonkeyPatch) -> None:
    assert spawn(1, [*program, "user"]) == 2
    assert capfd.readouterr().err == "error: batch 7 does not divide by 2: use batch 8\n"
    monkeypatch.setenv("VITPAR_DEBUG", "1")
    assert spawn(1, [*program, "user"]) == 2
    error = capfd.readouterr().err
    assert error.startswith("Traceback") and error.endswith("\nerror: batch 7 does not divide by 2: use batch 8\n")


def test_crash_of_a_library_at_exit_is_not_a_failure(program: list[str], capfd, monkeypatch) -> None:
    """torch's threads sometimes abort while the process exits; the exit code must still be that of the program."""
    assert spawn(2, [*program, "finished"]) == 75
    assert capfd.readouterr() == ("done\n", "rank 0 ended with exit code 75\n")
    assert spawn(2, [*program, "failed"]) == 1
    assert re.match(r"rank [01] failed: RuntimeError: the only cause\nTraceback", capfd.readouterr().err)
    monkeypatch.setattr(local, "SETTLE", 60.0)  # on a busy machine, one rank ends seconds before the other
    assert spawn(2, ["-c", "raise SystemExit(5)"]) == 5
    assert capfd.readouterr().err == "", "an exit code that all ranks have is passed on silently"
    assert report_failure(ValueError("mine")) is False, "without a parent"


@pytest.mark.parametrize(
    ("number", "code", "line"),
    [(signal.SIGINT, 130, "stopped by Ctrl-C\n"), (signal.SIGTERM, 143, "stopped by SIGTERM\n")],
)
def test_stopping_the_parent_stops_all_ranks(
    number: signal.Signals, code: int, line: str, program: list[str], tmp_path: Path
) -> None:
    process = parent(2, *program, "stuck", str(tmp_path))
    pids = stuck_pids(tmp_path, 2)
    process.send_signal(number)
    assert process.communicate()[1] == line
    assert process.returncode == code
    wait_until(lambda: not alive(pids))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGUSR1, 75)])
def test_ranks_that_do_not_train_yet_are_stopped_with_the_name_of_the_signal(
    number: signal.Signals, code: int, tmp_path: Path
) -> None:
    """Schedulers may start such a run again."""
    rank = (
        "import os, signal, sys, time; signal.signal(signal.SIGINT, signal.SIG_DFL); "
        "open(f'{sys.argv[1]}/pids{os.environ[\"RANK\"]}', 'w').write('1'); time.sleep(100)"
    )
    process = parent(2, "-c", rank, str(tmp_path), patient=True)
    stuck_pids(tmp_path, 2)
    process.send_signal(number)
    words = {signal.SIGINT: "Ctrl-C", signal.SIGUSR1: "SIGUSR1"}[number]
    assert (process.communicate()[1], process.returncode) == (f"stopped by {words}\n", code)


def test_killed_parent_leaves_no_orphans(program: list[str], tmp_path: Path) -> None:
    process = parent(2, *program, "stuck", str(tmp_path))
    pids = stuck_pids(tmp_path, 2)
    reports = Path(f"/proc/{pids[0]}/environ").read_text().split("VITPAR_REPORTS=")[1].split("\0")[0]
    assert Path(reports).exists()
    process.kill()
    process.wait()  # communicate() would block on a pipe that an orphan holds open
    wait_until(lambda: not alive(pids) and not Path(reports).exists())


# Joining


@pytest.fixture
def _restored() -> Iterator[None]:
    """Undo what `join` changes in this process."""
    import torch

    environ, threads = dict(os.environ), torch.get_num_threads()
    yield
    leave()
    torch.set_num_threads(threads)
    os.environ.clear()
    os.environ.update(environ)


@pytest.mark.usefixtures("_restored")
def test_world_of_one_rank_needs_no_network() -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(3)
    unreachable = replace(ALONE, master_addr="192.0.2.1")  # reserved for documentation
    assert join(unreachable, "cpu", timeout=5) == torch.device("cpu")
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == 1.0 and dist.get_world_size() == 1
    assert torch.get_num_threads() == 3  # a single rank keeps the thread count
    leave()
    assert not dist.is_initialized()
    leave()


@pytest.mark.usefixtures("_restored")
def test_rank_that_cannot_join_is_an_error() -> None:
    import torch

    if not torch.cuda.is_available():
        with pytest.raises(LaunchError, match="rank 0 needs GPU 0 but 0 are visible"):
            join(ALONE, "cuda")
    with socket.socket() as taken:  # a port without a listener, which no other test gets
        taken.bind(("127.0.0.1", 0))
        nobody_there = World(1, 2, 1, 2, "torchrun", *taken.getsockname())
        with pytest.raises(
            LaunchError, match=r"rank 1 of 2 waited 0\.5 s for rank 0 at 127\.0\.0\.1:\d+ .* MASTER_PORT"
        ):
            join(nobody_there, "cpu", timeout=0.5)
