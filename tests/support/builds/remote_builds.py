"""Builds in a bucket, and whether what a reader gives is what was written."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from obstore.store import from_url

from isobatch.shards.stored_group import StoredGroup
from support.builds.shard_fixture import Sample
from support.servers import StoreServer

IN_EVERY_STORE = pytest.mark.parametrize("store", ["s3", "gcs", "azure"], indirect=True)
"""Of a test with the fixture `store`."""


def client(server: StoreServer) -> Any:
    """Of the server's bucket, whatever the environment says."""
    config: dict[str, Any] = {name.lower(): value for name, value in server.environment.items()}
    return from_url(server.uri, config=config, client_options={"allow_http": True})


def upload(server: StoreServer, folder: Path, prefix: str) -> str:
    """Put a folder into the bucket; -> its URI."""
    store = client(server)
    paths = [path for path in folder.rglob("*") if path.is_file()]
    with ThreadPoolExecutor(8) as pool:
        list(
            pool.map(
                lambda path: store.put(f"{prefix}/{path.relative_to(folder)}", path.read_bytes()),
                paths,
            )
        )
    return f"{server.uri}/{prefix}"


def use(monkeypatch: Any, server: StoreServer, endpoint: str | None = None) -> None:
    """Lead clients to the server, or to a proxy in front of it."""
    for name, value in server.variables(endpoint or server.endpoint).items():
        monkeypatch.setenv(name, value)


def is_as_written(raw: StoredGroup, group: list[Sample]) -> bool:
    """Ids, tokens, labels and images of a group are the samples'."""
    return (
        raw.sample_ids == tuple(sample.sample_id for sample in group)
        and raw.input_ids.tolist() == [*chain(*(sample.input_ids for sample in group))]
        and raw.labels.tolist() == [*chain(*(sample.labels for sample in group))]
        and [bytes(image) for image in raw.images] == [*chain(*(sample.images for sample in group))]
    )
