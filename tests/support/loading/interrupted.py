"""A run to be interrupted: `interrupted.py BUILD` trains on and on, prints a line per step, and
never closes.
"""

import sys
import time

from isobatch.loaders import StreamingLoader


def main() -> None:
    loader = StreamingLoader(sys.argv[1], dp_rank=0, dp_world_size=1, workers=2)
    while True:
        for _ in loader:
            print("step", flush=True)
            time.sleep(0.01)


if __name__ == "__main__":
    main()
