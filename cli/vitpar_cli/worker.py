"""Rank of a world that a command started: `python -P -m vitpar_cli.worker` runs the job that the command hands over."""

import sys

from vitpar_cli.program import run_program


def _run() -> int:
    from vitpar.launch import find_world, finish
    from vitpar.launch.local import handed_over
    from vitpar_cli.world import Job

    job = Job.read(handed_over())
    sys.argv = job.command
    world = find_world()
    assert world is not None, "vitpar has started this process"
    finish(job.run(world))


def main() -> None:
    """Run the job of this rank and exit with its code."""
    run_program(_run)


if __name__ == "__main__":
    main()
