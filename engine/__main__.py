"""Entry point of `python -m engine`."""

from balance.interface.interrupts import quit_on_interrupt

if __name__ == "__main__":
    quit_on_interrupt()
    from engine.cli import main

    main()
