"""Worlds of processes: found in a launcher's environment, or started here, and ended with one error and no orphans."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from vitpar.errors import LaunchError
from vitpar.launch import ALONE, World, join, leave, report_failure, spawn
from vitpar.launch.report import PREFIX

# What the ranks of the tests run. Only the ways that need torch.distributed import torch, which takes seconds.
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
    sys.exit(3)

with reporting():
    world = find_world()
    way, last = sys.argv[1], world.rank == world.size - 1
    if way == "finished":
        import atexit
        from vitpar.launch import finish
        atexit.register(os.abort)
        print("done")
        finish(0 if last else 75)
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
                time.sleep(0.3)
        reduced()
    elif way == "meeting":
        if last:
            raise RuntimeError("not coming")
        join(world, "cpu", timeout=60)
    elif way == "stuck" or not last:
        stuck()
    else:
        fail()
'''


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests' own environment has no world, and joins in this process leave nothing behind."""
    launchers = re.compile(r"(SLURM|OMPI|PMIX|MASTER)_.*|(LOCAL_)?(RANK|WORLD_SIZE)|OMP_NUM_THREADS")
    for name in filter(launchers.fullmatch, list(os.environ)):
        monkeypatch.delenv(name)


@pytest.fixture
def program(tmp_path: Path) -> list[str]:
    """The arguments that run PROGRAM, which still lacks its own."""
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return [str(path)]


def parent(num_workers: int, *argv: str) -> subprocess.Popen[str]:
    """A process of its own that spawns `num_workers` ranks."""
    code = f"import sys; from vitpar.launch import spawn; sys.exit(spawn({num_workers}, sys.argv[1:], device='cpu'))"
    return subprocess.Popen([sys.executable, "-c", code, *argv], stderr=subprocess.PIPE, text=True)


def stuck_pids(folder: Path, ranks: int) -> list[int]:
    """The processes of `ranks` stuck ranks and their children, once all are there."""
    files = [folder / f"pids{rank}" for rank in range(ranks)]
    wait_until(lambda: all(file.exists() for file in files))
    return [int(pid) for file in files for pid in file.read_text().split()]


def alive(pid: int) -> bool:
    """Whether the process runs: a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(condition) -> None:
    """Waits for what has to happen soon; a hang is a failure."""
    for _ in range(3000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("waited 30 seconds in vain")


# Worlds started here


@pytest.mark.parametrize("size", [2, 4])
def test_spawned_ranks_reduce_and_share_the_cores(size: int, program: list[str], tmp_path: Path, capfd) -> None:
    assert spawn(size, [*program, "sum", str(tmp_path)], device="cpu") == 0
    threads = max(1, len(os.sched_getaffinity(0)) // size)
    total = size * (size + 1) / 2
    for rank in range(size):
        assert (tmp_path / f"sum{rank}").read_text() == f"vitpar {rank}/{size} {total} {threads}"
    assert capfd.readouterr().out == "device cpu\n", "rank 0 writes to the terminal, the others do not"


def test_threads_that_the_user_chose_stay(program: list[str], tmp_path: Path) -> None:
    assert spawn(1, [*program, "sum", str(tmp_path)], device="cpu", env={"OMP_NUM_THREADS": "7"}) == 0
    assert (tmp_path / "sum0").read_text() == "vitpar 0/1 1.0 7"


def test_killed_rank_is_the_cause_and_its_peers_are_not(program: list[str], capfd) -> None:
    assert spawn(2, [*program, "collective", "-", "kill"], device="cpu") == 1
    assert capfd.readouterr().err == "rank 1 was killed by SIGKILL (out of memory?)\n"


def test_cause_wins_over_a_peer_that_lost_its_connection_earlier(program: list[str], capfd) -> None:
    assert spawn(2, [*program, "collective", "-", "raise"], device="cpu") == 1
    error = capfd.readouterr().err
    assert error.startswith("rank 1 failed: RuntimeError: the true cause\nTraceback (most recent call last):\n")
    assert error.count("the true cause") == 2, "once in the headline, once in the line of source"
    assert "Connection closed" not in error


def test_rank_that_fails_before_the_others_meet_it(program: list[str], capfd) -> None:
    assert spawn(2, [*program, "meeting"], device="cpu") == 1
    assert capfd.readouterr().err.startswith("rank 1 failed: RuntimeError: not coming\n")


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
        ("exit", 3, r"rank 1 ended with exit code 3; its last output:\n  loading layer 3\n"),
        ("lost", 1, r"rank 1 failed: ConnectionError: Connection closed by peer\nTraceback .*"),
    ],
)
def test_a_failure_ends_all_and_is_shown_once(
    way: str, code: int, message: str, program: list[str], tmp_path: Path, capfd
) -> None:
    assert spawn(2, [*program, way, str(tmp_path)], device="cpu") == code
    assert re.fullmatch(message, capfd.readouterr().err, re.DOTALL)
    pids = stuck_pids(tmp_path, 1)
    wait_until(lambda: not any(alive(pid) for pid in pids))


def test_rank_0_reports_like_the_others(program: list[str], capfd) -> None:
    assert spawn(1, [*program, "user"], device="cpu") == 2
    assert capfd.readouterr().err == "error: batch 7 does not divide by 2: use batch 8\n"
    assert spawn(1, [*program, "user"], device="cpu", debug=True) == 2
    error = capfd.readouterr().err
    assert error.startswith("Traceback") and error.endswith("\nerror: batch 7 does not divide by 2: use batch 8\n")


def test_what_a_library_does_at_the_end_of_a_process_is_no_failure(tmp_path: Path) -> None:
    """Threads of torch abort there now and then."""
    for rank, code in ((0, 75), (1, 0)):
        env = {**os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"}
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29999"}
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, "finished"], env=env, capture_output=True, text=True, timeout=60
        )
        assert (done.returncode, done.stdout) == (code, "done\n"), done.stderr


def test_exit_code_on_which_all_agree_is_passed_on_silently(capfd) -> None:
    assert spawn(2, ["-c", "raise SystemExit(5)"], device="cpu") == 5
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("number", "code", "line"),
    [(signal.SIGINT, 130, "stopped by Ctrl-C\n"), (signal.SIGTERM, 143, "stopped by SIGTERM\n")],
)
def test_stopping_the_parent_stops_all(
    number: signal.Signals, code: int, line: str, program: list[str], tmp_path: Path
) -> None:
    process = parent(2, *program, "stuck", str(tmp_path))
    pids = stuck_pids(tmp_path, 2)
    process.send_signal(number)
    assert process.communicate()[1] == line
    assert process.returncode == code
    wait_until(lambda: not any(alive(pid) for pid in pids))


def test_killed_parent_leaves_no_orphans(program: list[str], tmp_path: Path) -> None:
    process = parent(2, *program, "stuck", str(tmp_path))
    pids = stuck_pids(tmp_path, 2)
    reports = Path(f"/proc/{pids[0]}/environ").read_text().split("VITPAR_REPORTS=")[1].split("\0")[0]
    assert Path(reports).exists()
    process.kill()
    process.wait()  # not communicate(): an orphan would hold the pipe open
    wait_until(lambda: not any(alive(pid) for pid in pids))
    wait_until(lambda: not Path(reports).exists())


def test_what_a_killed_launcher_left_is_removed_at_the_next_start(
    program: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary, victim = tmp_path / "temporary", tmp_path / "victim"
    temporary.mkdir()
    victim.mkdir()
    (victim / "lock").touch()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setenv("TMPDIR", str(temporary))
    launchers = []
    for name in ("killed", "living"):
        (tmp_path / name).mkdir()
        launchers.append(parent(2, *program, "stuck", str(tmp_path / name)))
        stuck_pids(tmp_path / name, 2)
    killed = launchers[0]
    folders = set(temporary.iterdir())
    assert len(folders) == 2 and all(path.name.startswith(PREFIX) for path in folders)
    try:
        # All at once: the launcher and, so that none of them can tidy up, its ranks before it.
        for pid in [*stuck_pids(tmp_path / "killed", 2), killed.pid]:
            os.kill(pid, signal.SIGSTOP)
        for pid in [*stuck_pids(tmp_path / "killed", 2), killed.pid]:
            os.kill(pid, signal.SIGKILL)
        killed.wait()
        assert set(temporary.iterdir()) == folders
        others = [temporary / f"{PREFIX}{name}" for name in ("link", "new", "file")]
        others[0].symlink_to(victim)
        others[1].mkdir()  # of a launcher that has not locked it yet
        others[2].touch()
        (linked := temporary / f"{PREFIX}linked").mkdir()
        (linked / "lock").symlink_to(victim / "lock")
        assert spawn(1, ["-c", "1"], device="cpu") == 0
        assert (victim / "lock").exists() and all(os.path.lexists(path) for path in [*others, linked])
        (left,) = [path for path in folders if path.exists()]
        reports = f"VITPAR_REPORTS={left}\0".encode()
        assert reports in Path(f"/proc/{stuck_pids(tmp_path / 'living', 2)[0]}/environ").read_bytes()
    finally:
        for process in launchers:
            process.kill()
            process.communicate()


def test_nothing_is_reported_where_no_parent_listens() -> None:
    assert report_failure(ValueError("mine")) is False


def test_worlds_that_this_machine_cannot_hold() -> None:
    with pytest.raises(LaunchError, match="cannot start 0 workers: start at least 1"):
        spawn(0, [], device="cpu")
    with pytest.raises(LaunchError, match=r"999 ranks need a GPU each but .* are visible"):
        spawn(999, [], device="cuda")


# Joining


@pytest.fixture
def _restored() -> Iterator[None]:
    """Puts back what `join` changes in this process."""
    import torch

    environ, threads = dict(os.environ), torch.get_num_threads()
    yield
    leave()
    torch.set_num_threads(threads)
    os.environ.clear()
    os.environ.update(environ)


@pytest.mark.usefixtures("_restored")
def test_a_world_of_one_needs_no_network() -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(3)
    unreachable = replace(ALONE, master_addr="192.0.2.1")  # reserved for documentation
    assert join(unreachable, "cpu", timeout=5) == torch.device("cpu")
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == 1.0 and dist.get_world_size() == 1
    assert torch.get_num_threads() == 3  # alone on its machine it has what it had
    leave()
    assert not dist.is_initialized()
    leave()


@pytest.mark.usefixtures("_restored")
def test_rank_that_cannot_join() -> None:
    import torch

    if not torch.cuda.is_available():
        with pytest.raises(LaunchError, match="rank 0 needs GPU 0 but 0 are visible"):
            join(ALONE, "cuda")
    nobody_there = World(1, 2, 1, 2, "torchrun", "127.0.0.1", 1)
    with pytest.raises(
        LaunchError, match=r"rank 1 of 2 could not connect to the others at 127\.0\.0\.1:1 .* MASTER_PORT"
    ):
        join(nobody_there, "cpu", timeout=0.5)


SHARED = {
    "join": (
        "from vitpar.launch import World, join, leave",
        "try: join(World(1, 2, 1, 2, 'torchrun', '127.0.0.1', 1), 'cpu', timeout=0.5)",  # no other rank comes
        "except Exception: pass",
    ),
    "the command line": (
        "from vitpar.launch import leave",
        "from vitpar_cli.main import main",
        "sys.argv = ['vitpar', 'plan', 'dp2', '--model', 'vit_tiny_patch16_224', '--json']",
        "try: main()",
        "except SystemExit as end: assert not end.code, end.code",
    ),
}


@pytest.mark.parametrize("by", SHARED)
def test_cores_are_shared_before_torch_counts_them(by: str) -> None:
    """A number of threads that is set later makes MKL lose its way of detecting nested calls."""
    before = ("import os, sys", *SHARED[by], "there = os.environ['OMP_NUM_THREADS']")
    after = ("import torch; print(there, torch.get_num_threads())", "leave(); print('OMP_NUM_THREADS' in os.environ)")
    launched = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    env = {**os.environ, **launched, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    done = subprocess.run([sys.executable, "-c", "\n".join((*before, *after))], env=env, capture_output=True, text=True)
    share = str(max(1, len(os.sched_getaffinity(0)) // 2))
    assert done.stdout.split()[-3:] == [share, share, "False"], done.stderr


def test_torchrun_starts_a_world_that_we_join(program: list[str], tmp_path: Path) -> None:
    argv = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", *program, "sum", str(tmp_path)]
    subprocess.run([sys.executable, *argv], check=True, capture_output=True)
    assert [(tmp_path / f"sum{rank}").read_text() for rank in range(2)] == [f"torchrun {r}/2 3.0 1" for r in range(2)]
