"""Work in a process of its own, so that nothing it leaves behind (threads of process groups, memory) meets what comes
after it."""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import TypeVar

from vitpar.launch.report import watch_parent

T = TypeVar("T")


def apart(work: Callable[[], T]) -> T:
    """What `work` returns in a process forked from this one, which must not have used a GPU. Raises what it raises, or
    RuntimeError where the process dies."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(work, theirs))
    process.start()
    theirs.close()
    try:
        done, result = ours.recv()
    except EOFError:
        process.join()
        raise RuntimeError(f"the process that ran a plan ended with code {process.exitcode}") from None
    process.join()
    if not done:
        raise result
    return result


def _run(work: Callable[[], T], connection: Connection) -> None:
    watch_parent()
    try:
        answer: tuple[bool, T | BaseException] = (True, work())
    except BaseException as error:
        error.add_note(traceback.format_exc())
        answer = (False, error)
    try:
        connection.send(answer)
    except (TypeError, AttributeError):  # an exception that cannot be sent
        connection.send((False, RuntimeError(str(answer[1]))))
