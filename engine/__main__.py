"""Entry point of `python -m engine`."""

from isobatch.common.interrupts import quit_on_interrupt

if __name__ == "__main__":
    quit_on_interrupt()
    from isobatch.engine.cli import main

    main()
