"""Runs without a build that are killed, and continue on other numbers of ranks."""

import json
import os
from pathlib import Path

from support.loading.online_data import open_ranks, records
from support.ranks import context, kill_once

KILLS = min(10, int(os.environ.get("ISOBATCH_TEST_DRAWS", "2")))
EPOCHS = 1 + KILLS


def consume(folder, rows, world):
    """Train from the last saved step to the end, saving what each step held with the state."""
    folder = Path(folder)
    saved = sorted(folder.glob("step-*.json"))
    state = json.loads(saved[-1].read_text())["state"] if saved else None
    ranks = open_ranks(rows, world, folder, state=state, images="encoded", workers=0)
    number = len(saved)
    while ranks[0].epoch < EPOCHS:
        for step in zip(*ranks, strict=True):
            names = [name for own in step for batch in own for name in batch.sample_ids]
            (after,) = {json.dumps(loader.state_dict()) for loader in ranks}
            given = {"names": names, "state": json.loads(after)}
            (folder / "unfinished").write_text(json.dumps(given))
            (folder / "unfinished").rename(folder / f"step-{number:04d}.json")
            number += 1
    (folder / "ended").touch()


def test_killed_runs_give_every_sample_once_per_epoch(tmp_path):
    rows = records(tmp_path, 120, images=False)

    def num_saved():
        return len([*tmp_path.glob("step-*.json")])

    for kill in range(KILLS):
        before, world = num_saved(), 1 + kill % 3
        run = context.Process(target=consume, args=(str(tmp_path), rows, world))
        run.start()
        kill_once([run], lambda before=before: num_saved() > before + 1)
    last = context.Process(target=consume, args=(str(tmp_path), rows, 2))
    last.start()
    last.join(90)
    assert (tmp_path / "ended").exists()
    given = [json.loads(file.read_text()) for file in sorted(tmp_path.glob("step-*.json"))]
    expected = sorted(row["id"] for row in rows)
    for epoch in range(EPOCHS):
        names = [n for step in given if step["state"]["epoch"] == epoch for n in step["names"]]
        assert sorted(names) == expected, epoch
