"""A run to be killed: `consume_steps.py BUILD FOLDER WORLD` writes what each step of all ranks gave, and the state."""

import json
import sys
import time
from pathlib import Path

from loaders import StreamingLoader


def main() -> None:
    build, folder, world = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    state = json.loads((folder / "start.json").read_text())
    ranks = [StreamingLoader(build, dp_rank=rank, dp_world_size=world, workers=2) for rank in range(world)]
    for loader in ranks:
        if state is not None:
            loader.load_state_dict(state)
    for number, step in enumerate(zip(*ranks, strict=True)):
        content = {
            "sample_ids": [sample_id for rank in step for batch in rank for sample_id in batch.sample_ids],
            "state": ranks[-1].state_dict(),
        }
        (folder / "step.tmp").write_text(json.dumps(content))
        (folder / "step.tmp").rename(folder / f"step-{number:05d}.json")
        time.sleep(0.02)  # as training would; there are always steps left when the kill comes


if __name__ == "__main__":
    main()
