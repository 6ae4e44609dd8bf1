"""Builds in a bucket, and whether what a reader gives is what was written."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any

from obstore.store import S3Store

from isobatch.shards.stored_group import StoredGroup
from support.builds.shard_fixture import Sample
from support.servers import S3Server


def client(s3: S3Server) -> Any:
    return S3Store(
        s3.bucket,
        endpoint=s3.endpoint,
        access_key_id=s3.access_key,
        secret_access_key=s3.secret_key,
        client_options={"allow_http": True},
    )


def upload(s3: S3Server, folder: Path, prefix: str) -> str:
    """Put a folder into the bucket; -> its URI."""
    store = client(s3)
    paths = [path for path in folder.rglob("*") if path.is_file()]
    with ThreadPoolExecutor(8) as pool:
        list(
            pool.map(
                lambda path: store.put(f"{prefix}/{path.relative_to(folder)}", path.read_bytes()),
                paths,
            )
        )
    return f"s3://{s3.bucket}/{prefix}"


def use(monkeypatch: Any, s3: S3Server, endpoint: str | None = None) -> None:
    """Lead clients to the server, or to a proxy in front of it."""
    for name, value in {**s3.environment, "AWS_ENDPOINT_URL": endpoint or s3.endpoint}.items():
        monkeypatch.setenv(name, value)


def is_as_written(raw: StoredGroup, group: list[Sample]) -> bool:
    """Ids, tokens, labels and images of a group are the samples'."""
    return (
        raw.sample_ids == tuple(sample.sample_id for sample in group)
        and raw.input_ids.tolist() == [*chain(*(sample.input_ids for sample in group))]
        and raw.labels.tolist() == [*chain(*(sample.labels for sample in group))]
        and [bytes(image) for image in raw.images] == [*chain(*(sample.images for sample in group))]
    )
