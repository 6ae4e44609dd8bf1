"""`python -m engine`: see `engine.cli`."""

from __future__ import annotations

from engine.cli import main

if __name__ == "__main__":
    main()
