"""The limit of open files (``ulimit -n``), in which every connection between ranks counts."""

from __future__ import annotations

import resource

from vitpar.errors import LaunchError

ENOUGH = 4096
"""Open files that a process is given where its hard limit allows them: shards of data, process groups of many axes."""
LEAST, LEAST_A_RANK = 48, 3
"""Open files without which ranks do not come together.

Seen at most (torch 2.13): 17 and 3 for each rank in the process that holds the store; in a rank 31 of 2 ranks under
dp2, 49 of 4 under pp2xdp2, 63 of 8 under pp2xtp2xdp2.
"""


def allow_open_files(ranks: int) -> None:
    """Let this process, and those that it starts, open as many files as a world of `ranks` needs.

    Raises LaunchError where the hard limit does not allow it: the store would not take the last connections, and all
    would wait for each other.
    """
    least = LEAST + LEAST_A_RANK * ranks if ranks > 1 else 0
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = float("inf") if hard == resource.RLIM_INFINITY else hard
    if most < least:
        raise LaunchError(
            f"{ranks} ranks need {least} open files in a process, but the limit is {hard}: raise it (`ulimit -n "
            f"{least}`), or start fewer ranks"
        )
    wanted = int(min(most, max(least, ENOUGH)))
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
