"""Frame of every vitpar process, command or rank: standard streams, shared cores, errors as sentences, exit codes."""

import os
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

from vitpar.errors import FaultError, LaunchError, UserError
from vitpar.launch import find_world, reporting, share_cores
from vitpar.terminal import complain, forwarded
from vitpar_cli.streams import outlive_reader, prepare_streams, storage_error_as_sentence


def run_program(program: Callable[[], int]) -> NoReturn:
    """Run `program` and exit with the code that it returns.

    Exit codes: 0 for success, 1 for a failure, 2 for an error that the user must fix, 130 after Ctrl-C.
    """
    prepare_streams()
    try:
        with reporting(), storage_error_as_sentence():
            with suppress(LaunchError):  # the command reports it if it needs a world
                if world := find_world():
                    share_cores(world)  # must precede the import of torch
                    if world.size > 1:
                        outlive_reader()  # other ranks wait for this one
                    if world.launcher == "openmpi":
                        forwarded()
            code = program()
        sys.exit(code)
    except KeyboardInterrupt:
        sys.exit(130)
    except (UserError, FaultError) as error:
        if os.environ.get("VITPAR_DEBUG"):
            traceback.print_exc()
        complain(f"error: {error}")
        sys.exit(2 if isinstance(error, UserError) else 1)
