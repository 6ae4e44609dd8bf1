"""WebDataset: batches are made in the workers, as its documentation advises; from S3 by `pipe:`,
with curl.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import measure
import webdataset as wds
from tars import IMAGE, NAMES, TOKENS, read_tokens, write_tars

CURL = (
    "pipe:curl --silent --fail --aws-sigv4 aws:amz:$AWS_REGION:s3 "
    "--user $AWS_ACCESS_KEY_ID:$AWS_SECRET_ACCESS_KEY "
)


def write(samples: list[measure.Sample], folder: Path) -> None:
    """Tars."""
    write_tars(samples, folder)


def open_loader(task: measure.Task) -> Iterable[Any]:
    """Shards in order; a worker reads every second one."""

    def sample_of(members: dict[str, Any]) -> tuple[Any, measure.Tokens]:
        return measure.image_of(task, members[IMAGE]), read_tokens(members[TOKENS])

    place = (
        f"{CURL}$AWS_ENDPOINT_URL/{task.place.removeprefix('s3://')}" if task.remote else task.place
    )
    dataset = wds.WebDataset([f"{place}/{name}" for name in NAMES], shardshuffle=False).map(
        sample_of
    )
    dataset = dataset.batched(measure.BATCH, collation_fn=measure.pack)
    return wds.WebLoader(
        dataset, batch_size=None, num_workers=task.workers, persistent_workers=task.workers > 0
    )


if __name__ == "__main__":
    measure.main(write, open_loader, package="webdataset")
