"""Run `vitpar` with an injected fault: one rank is killed, fails or is asked to end at one place in the program.

    python experiments/faults/injected.py KIND RANK COUNT FILE train --recipe …

The fault KIND (of `FAULTS`) hits RANK when it reaches the place for the COUNT-th time. FILE is created at that moment.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Fault = Callable[[], None]
LAUNCHED = "RANK" in os.environ
"""Whether a launcher started this process. Read at import, because joining the world sets the same variables."""


def kill() -> None:
    """Kill this process with SIGKILL, as the kernel does when memory runs out."""
    os.kill(os.getpid(), signal.SIGKILL)


class Trap:
    """Counter that triggers a fault when rank `rank` calls it for the `count`-th time.

    file: created when the fault is triggered.
    """

    def __init__(self, rank: int, count: int, file: Path) -> None:
        self._rank, self._left, self._file = rank, count, file

    def __call__(self, fault: Fault) -> None:
        """Count a call, and trigger `fault` if it is the one."""
        import torch.distributed as dist

        if dist.get_rank() == self._rank:
            self._left -= 1
            if self._left == 0:
                self._file.touch()
                fault()


def before(owner: Any, name: str, act: Callable[..., None]) -> None:
    """Replace ``owner.name`` so that `act` runs first, with the same arguments."""
    former = getattr(owner, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        act(*args, **kwargs)
        return former(*args, **kwargs)

    setattr(owner, name, wrapped)


def after(owner: Any, name: str, act: Callable[[Any], None]) -> None:
    """Replace ``owner.name`` so that `act` runs afterwards, with its result."""
    former = getattr(owner, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        result = former(*args, **kwargs)
        act(result)
        return result

    setattr(owner, name, wrapped)


def forward(trap: Trap) -> None:
    from vitpar.models.vit.layers import Block

    before(Block, "forward", lambda *_, **__: trap(kill))


def backward(trap: Trap) -> None:
    from vitpar.models.vit.layers import Block

    after(Block, "forward", lambda out: out.register_hook(lambda _: trap(kill)) if out.requires_grad else None)


def optimizer(trap: Trap) -> None:
    """Kill between the update of the parameters and that of their averages."""
    from vitpar.training.optim.optimizer import ShardedOptimizer

    after(ShardedOptimizer, "step", lambda _: trap(kill))


def anywhere(trap: Trap) -> None:
    """Kill at an arbitrary time within a second from the start of a step."""
    from vitpar.training.trainer import Trainer

    wait = time.time() % 1
    before(Trainer, "step", lambda *_: trap(lambda: threading.Timer(wait, kill).start()))


def bug(trap: Trap) -> None:
    from vitpar.training.trainer import Trainer

    def fail() -> None:
        raise RuntimeError("a bug")

    before(Trainer, "step", lambda *_: trap(fail))


def staging(trap: Trap) -> None:
    """Kill when half of the tensors are copied."""
    from vitpar.checkpoint.image import SafetensorsBuffer

    def half(image: SafetensorsBuffer, tensors: Any) -> None:
        for view in list(image._views.values())[::2]:
            view.zero_()
        trap(kill)

    before(SafetensorsBuffer, "stage", half)


def _at_file(trap: Trap, name: str, fault: Callable[[Path, memoryview], None]) -> None:
    """Trigger `fault` before a file is written whose name starts with `name`."""
    from vitpar.checkpoint import atomic

    def act(path: Path, content: Any) -> None:
        if path.name.startswith(name):
            trap(lambda: fault(path, memoryview(content)))

    before(atomic, "write", act)


def _half(path: Path, content: memoryview) -> None:
    path.write_bytes(content[: len(content) // 2])
    kill()


def _full(path: Path, content: memoryview) -> None:
    path.write_bytes(content[: len(content) // 2])
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


def writing(trap: Trap) -> None:
    _at_file(trap, "shard-", _half)


def index(trap: Trap) -> None:
    _at_file(trap, "index", _half)


def disk_full(trap: Trap) -> None:
    _at_file(trap, "shard-", _full)


def index_full(trap: Trap) -> None:
    _at_file(trap, "index", _full)


def lost(trap: Trap) -> None:
    """Delete a file that a rank has written, as if rank 0 could not see its disk."""
    from vitpar.checkpoint import atomic

    write = atomic.write

    def written(path: Path, content: Any) -> Any:
        stored = write(path, content)
        if path.name.startswith("shard-"):
            trap(path.unlink)
        return stored

    atomic.write = written


def read_only(trap: Trap) -> None:
    from vitpar.checkpoint import atomic

    def refuse() -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    before(atomic, "begin", lambda _: trap(refuse))


def rename(trap: Trap) -> None:
    """Kill when all files are written but the folder is not renamed yet."""
    from vitpar.checkpoint import atomic

    before(atomic, "publish", lambda _: trap(kill))


def removal(trap: Trap) -> None:
    """Kill when an old checkpoint is half deleted."""
    from vitpar.checkpoint import atomic

    def half(folder: Any, *_: Any, **__: Any) -> None:
        files = sorted(Path(folder).glob("*")) if Path(folder).suffix == ".removed" else []
        for file in files[::2]:
            file.unlink()
        if files:
            trap(kill)

    before(atomic.shutil, "rmtree", half)


def slow_rank(trap: Trap) -> None:
    """Pause one rank for 2 s, then ask the run to end."""
    from vitpar.training.trainer import Trainer

    def stand() -> None:
        time.sleep(2)
        _ask_launcher(signal.SIGTERM)

    before(Trainer, "step", lambda *_: trap(stand))


def _ask_launcher(number: signal.Signals) -> None:
    os.kill(os.getppid() if LAUNCHED else os.getpid(), number)


def _asked(number: signal.Signals, ask: Callable[[signal.Signals], None]) -> Callable[[Trap], None]:
    def install(trap: Trap) -> None:
        from vitpar.training.trainer import Trainer

        before(Trainer, "step", lambda *_: trap(lambda: ask(number)))

    return install


def _ask_rank(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


FAULTS: dict[str, Callable[[Trap], None]] = {
    "killed in forward": forward,
    "killed in backward": backward,
    "killed in the optimizer": optimizer,
    "killed anywhere": anywhere,
    "killed while staging": staging,
    "killed while writing": writing,
    "killed while writing the index": index,
    "killed before renaming": rename,
    "killed while removing": removal,
    "disk full": disk_full,
    "disk full at the index": index_full,
    "file not seen by others": lost,
    "read-only folder": read_only,
    "exception": bug,
    "slow rank, then SIGTERM": slow_rank,
    "SIGTERM to a rank": _asked(signal.SIGTERM, _ask_rank),
    "SIGUSR1 to a rank": _asked(signal.SIGUSR1, _ask_rank),
    "SIGTERM to the launcher": _asked(signal.SIGTERM, _ask_launcher),
    "Ctrl-C": _asked(signal.SIGINT, _ask_launcher),
}
TOLD = ("disk full", "disk full at the index", "file not seen by others", "read-only folder")
"""Faults that end a run with an error message about the disk."""
OF_RANK_0 = (
    *("killed while writing the index", "killed before renaming", "killed while removing"),
    *("disk full at the index", "read-only folder"),
)
"""Faults at places that only rank 0 reaches."""
OF_SAVES = (*OF_RANK_0, *TOLD, "killed while staging", "killed while writing")
"""Faults at places that are reached once per checkpoint, not once per step."""


def main() -> None:
    """Install the fault and run `vitpar`; its ranks are started with the same fault."""
    import vitpar.launch
    from vitpar_cli import main as program

    given = sys.argv[1:]
    kind, rank, count, file, *words = given
    spawn = vitpar.launch.spawn
    vitpar.launch.spawn = lambda workers, argv, **options: spawn(workers, [__file__, *given], **options)
    sys.argv = ["vitpar", *words]
    if LAUNCHED or "dp1" in words:  # not in the launcher
        FAULTS[kind](Trap(int(rank), int(count), Path(file)))
    program.main()


if __name__ == "__main__":
    main()
