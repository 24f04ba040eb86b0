"""Run `vitpar` with an injected fault: one rank is killed, fails or is asked to end at one place in the program.

    python tests/helpers/injected_faults.py KIND RANK COUNT FILE -m vitpar_cli.main train --recipe …

The fault KIND (of `FAULTS`) hits RANK when it reaches the place for the COUNT-th time. FILE is created at that moment.
"""

from __future__ import annotations

import errno
import importlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

LAUNCHED = "RANK" in os.environ
"""Whether a launcher started this process. Read at import, because joining the world sets the same variables."""


def kill(*_: Any) -> None:
    """Kill this process with SIGKILL, as the kernel does when memory runs out."""
    os.kill(os.getpid(), signal.SIGKILL)


class Trap:
    """Counter that triggers a fault when rank `rank` calls it for the `count`-th time.

    file: created when the fault is triggered.
    """

    def __init__(self, rank: int, count: int, file: Path) -> None:
        self._rank, self._left, self._file = rank, count, file

    def __call__(self, fault: Callable[[], None]) -> None:
        """Count a call, and trigger `fault` if it is the one."""
        import torch.distributed as dist

        if dist.get_rank() == self._rank:
            self._left -= 1
            if self._left == 0:
                self._file.touch()
                fault()


Install = Callable[[Trap], None]
"""Function that lets a trap be called at one place of the program."""


def replaced(path: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace the function or method at `path` (module:name or module:class.name) by what `wrap` makes of it."""
    module, _, names = path.partition(":")
    *outer, name = names.split(".")
    owner = importlib.import_module(module)
    for part in outer:
        owner = getattr(owner, part)
    setattr(owner, name, wrap(getattr(owner, name)))


def before(path: str, fault: Callable[..., None], applies: Callable[..., bool] = lambda *_, **__: True) -> Install:
    """Return an installer of `fault` before calls of `path`; it gets their arguments.

    applies: whether a call counts.
    """

    def install(trap: Trap) -> None:
        def wrap(former: Callable[..., Any]) -> Callable[..., Any]:
            @wraps(former)  # layers that `fully_shard` wraps look at the signature of forward again
            def called(*args: Any, **kwargs: Any) -> Any:
                if applies(*args, **kwargs):
                    trap(lambda: fault(*args))
                return former(*args, **kwargs)

            return called

        replaced(path, wrap)

    return install


def after(path: str, act: Callable[..., None]) -> Install:
    """Return an installer that calls `act` after calls of `path`, with the trap, their result and arguments."""

    def install(trap: Trap) -> None:
        def wrap(former: Callable[..., Any]) -> Callable[..., Any]:
            @wraps(former)  # layers that `fully_shard` wraps look at the signature of forward again
            def called(*args: Any, **kwargs: Any) -> Any:
                result = former(*args, **kwargs)
                act(trap, result, *args)
                return result

            return called

        replaced(path, wrap)

    return install


def each(*installs: Install) -> Install:
    """Return an installer of several: their places are counted together."""

    def install(trap: Trap) -> None:
        for one in installs:
            one(trap)

    return install


STEP = "vitpar.training.trainer:Trainer.step"
EVALUATION = "vitpar.training.trainer:evaluate"
BLOCKS = ("vitpar.models.vit.layers:Block.forward", "vitpar.models.bert.layers:Block.forward")
WRITE = "vitpar.checkpoint.atomic:write"


def in_backward(trap: Trap, out: Any, *_: Any) -> None:
    """Kill in the backward of a block."""
    if out.requires_grad:
        out.register_hook(lambda _: trap(kill))


def fail(*_: Any) -> None:
    """Raise an error that is a bug."""
    raise RuntimeError("a bug")


def half_staged(buffer: Any, tensors: Any) -> None:
    """Kill when half of the tensors are copied."""
    for view in list(buffer._views.values())[::2]:
        view.zero_()
    kill()


def half_written(path: Path, content: Any) -> None:
    """Kill when half of a file is written."""
    path.write_bytes(memoryview(content)[: len(content) // 2])
    kill()


def full(path: Path, content: Any) -> None:
    """Let the disk be full when half of a file is written."""
    path.write_bytes(memoryview(content)[: len(content) // 2])
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


def read_only(*_: Any) -> None:
    """Refuse to write."""
    raise OSError(errno.EROFS, os.strerror(errno.EROFS))


def unseen(trap: Trap, _: Any, path: Path, *__: Any) -> None:
    """Delete a file that a rank has written, as if rank 0 could not see its disk."""
    if path.name.startswith("shard-"):
        trap(path.unlink)


def half_removed(folder: Any, *_: Any) -> None:
    """Kill when an old checkpoint is half deleted."""
    for file in sorted(Path(folder).glob("*"))[::2]:
        file.unlink()
    kill()


def named(start: str) -> Callable[..., bool]:
    """Return a test of whether a file's name starts with `start`."""
    return lambda path, *_: path.name.startswith(start)


def sent(number: signal.Signals, launcher: bool = True) -> Callable[..., None]:
    """Return a fault: a signal to the launcher, or to the rank itself."""
    return lambda *_, **__: os.kill(os.getppid() if launcher and LAUNCHED else os.getpid(), number)


def slow(*_: Any) -> None:
    """Pause for 2 s, then ask the run to end."""
    time.sleep(2)
    os.kill(os.getppid() if LAUNCHED else os.getpid(), signal.SIGTERM)


FAULTS: dict[str, Install] = {
    "killed in forward": each(*(before(block, kill) for block in BLOCKS)),
    "killed in backward": each(*(after(block, in_backward) for block in BLOCKS)),
    # Between the update of the parameters and that of their averages.
    "killed in the optimizer": after(
        "vitpar.training.optim.optimizer:ShardedOptimizer.step", lambda trap, *_: trap(kill)
    ),
    # Within a second from the start of a step.
    "killed anywhere": before(STEP, lambda *_: threading.Timer(time.time() % 1, kill).start()),
    "killed while staging": before("vitpar.checkpoint.image:SafetensorsBuffer.stage", half_staged),
    "killed while writing": before(WRITE, half_written, named("shard-")),
    "killed while writing the index": before(WRITE, half_written, named("index")),
    "killed before renaming": before("vitpar.checkpoint.atomic:publish", kill),
    "killed while removing": before(
        "vitpar.checkpoint.atomic:shutil.rmtree",
        half_removed,
        lambda folder, *_, **__: Path(folder).suffix == ".removed" and any(Path(folder).glob("*")),
    ),
    "disk full": before(WRITE, full, named("shard-")),
    "disk full at the index": before(WRITE, full, named("index")),
    "file not seen by others": after(WRITE, unseen),
    "read-only folder": before("vitpar.checkpoint.atomic:begin", read_only),
    "exception": before(STEP, fail),
    "slow rank, then SIGTERM": before(STEP, slow),
    "SIGTERM to a rank": before(STEP, sent(signal.SIGTERM, launcher=False)),
    "SIGUSR1 to a rank": before(STEP, sent(signal.SIGUSR1, launcher=False)),
    "SIGTERM to the launcher": before(STEP, sent(signal.SIGTERM)),
    "SIGTERM in a save": before(WRITE, sent(signal.SIGTERM), named("shard-")),
    "SIGUSR1 in an evaluation": before(EVALUATION, sent(signal.SIGUSR1)),
    "Ctrl-C": before(STEP, sent(signal.SIGINT)),
    "launcher killed": before(STEP, sent(signal.SIGKILL)),
    "SIGSTOP": before(STEP, sent(signal.SIGSTOP, launcher=False)),
    "asleep": before(STEP, lambda *_: time.sleep(1000)),
}
TOLD = ("disk full", "disk full at the index", "file not seen by others", "read-only folder")
"""Faults that end a run with an error message about the disk."""
OF_RANK_0 = (
    *("killed while writing the index", "killed before renaming", "killed while removing"),
    *("disk full at the index", "read-only folder"),
)
"""Faults at places that only rank 0 reaches."""
OF_SAVES = (*OF_RANK_0, *TOLD, "killed while staging", "killed while writing", "SIGTERM in a save")
"""Faults at places that are reached once per checkpoint, not once per step."""
HANGS = ("SIGSTOP", "asleep")
"""Faults after which the other ranks wait."""


def main() -> None:
    """Install the fault and run `vitpar`; its ranks are started with the same fault."""
    import vitpar.launch
    from vitpar.launch.world import REPORTS
    from vitpar_cli import main, worker

    given = sys.argv[1:]
    kind, rank, count, file, _, _, *words = given
    spawn = vitpar.launch.spawn
    vitpar.launch.spawn = lambda workers, argv, **options: spawn(workers, [__file__, *given], **options)
    sys.argv = ["vitpar", *words]
    if LAUNCHED or "dp1" in words:  # not in the launcher
        FAULTS[kind](Trap(int(rank), int(count), Path(file)))
    (worker if REPORTS in os.environ else main).main()


if __name__ == "__main__":
    main()
