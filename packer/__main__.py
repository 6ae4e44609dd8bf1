"""Entry point of the `packer` command and of `python -m packer`."""

import sys

from isobatch.common.interrupts import quit_on_interrupt


def main() -> None:
    """Load the command and run it."""
    quit_on_interrupt()
    if sys.argv[1:2] == ["build"]:  # the rest takes as long to load as a tenth of the kernels
        from isobatch.balance.grouping import compile_ahead  # noqa: PLC0415

        compile_ahead.begin()
    from isobatch.common.command_line import run_module  # noqa: PLC0415 - this is what takes long

    run_module("isobatch.packer.cli")


if __name__ == "__main__":  # not in a worker process, which loads this file too
    main()
