"""The one client for object stores: `open_store`.

Credentials and endpoint come from the environment, as the provider's own tools read them, or from
the file that ISOBATCH_CREDENTIALS_FILE names. The file is read with each new client, so a client
that is opened when the old credentials are refused has the new ones. obstore is an optional extra
(`isobatch[cloud]`), imported when a store is first used.
"""

import os
import shlex
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isobatch.common.errors import ConfigError
from isobatch.shards.store_errors import CREDENTIALS_FILE, no_obstore, wrong_options

if TYPE_CHECKING:
    from obstore.store import ClientConfig, RetryConfig

_FIRST_PAUSE_S, _LONGEST_BACKOFF_S = 0.1, 15.0
"""Pauses between obstore's own tries."""
_CONNECT_S = 5.0
_ENDPOINTS = (
    *("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    *("GOOGLE_BASE_URL", "AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
)
_PREFIXES = {"s3": "AWS_", "gs": "GOOGLE_", "az": "AZURE_"}
"""Scheme of a URI -> how the names of its variables begin."""
_NO_OPTIONS = frozenset({"AWS_CREDENTIAL_EXPIRATION"})
"""What `aws configure export-credentials` prints and obstore does not take."""

_used_by: set[int] = set()
"""The process that has used obstore, whose threads do not survive a fork."""


def split_uri(uri: str) -> tuple[str, str]:
    """The bucket's URI, and the prefix of the keys. ConfigError if it names no bucket.

    >>> split_uri("s3://bucket/a/b/")
    ('s3://bucket', 'a/b')
    """
    scheme, _, rest = uri.partition("://")
    bucket, _, prefix = rest.partition("/")
    if not bucket:
        raise ConfigError(f"{uri}: a URI names a bucket: {scheme}://BUCKET/FOLDER")
    return f"{scheme}://{bucket}", prefix.rstrip("/")


def open_store(
    uri: str, *, retries: int, retry_s: float, read_timeout_s: float, request_s: float
) -> Any:
    """A client of the bucket that a URI is in; ConfigError if it cannot be opened.

    It makes `retries` more tries in `retry_s`, and continues bodies that break off. It gives up a
    connection that sends nothing after `read_timeout_s`, a request after `request_s`.
    """
    refuse_fork(uri)
    try:
        from obstore.exceptions import BaseError  # noqa: PLC0415 - an optional extra
        from obstore.store import from_url  # noqa: PLC0415
    except ModuleNotFoundError:
        raise no_obstore(uri) from None
    bucket, _ = split_uri(uri)
    from_file = _credentials_file(bucket.partition("://")[0])
    values = {**os.environ, **from_file}
    endpoints = [bucket, *(values.get(name, "") for name in _ENDPOINTS)]
    client: ClientConfig = {
        "connect_timeout": timedelta(seconds=_CONNECT_S),
        "read_timeout": timedelta(seconds=read_timeout_s),
        "timeout": timedelta(seconds=request_s),
        "allow_http": any(endpoint.startswith("http://") for endpoint in endpoints),
    }
    retry: RetryConfig = {
        "max_retries": retries,
        "retry_timeout": timedelta(seconds=retry_s),
        "backoff": {
            "init_backoff": timedelta(seconds=_FIRST_PAUSE_S),
            "max_backoff": timedelta(seconds=_LONGEST_BACKOFF_S),
            "base": 2,
        },
    }
    try:
        options: Any = {name.lower(): value for name, value in from_file.items()}
        return from_url(bucket, config=options, client_options=client, retry_config=retry)
    except (BaseError, ValueError) as error:
        raise wrong_options(uri, error) from None


def _credentials_file(scheme: str) -> dict[str, str]:
    """Variables of a scheme in the user's file, if there is one; ConfigError if it cannot be read.

    Lines are `NAME=value` or `export NAME=value`, as in a shell.
    """
    path = os.environ.get(CREDENTIALS_FILE)
    if not path:
        return {}
    try:
        words = shlex.split(Path(path).read_text(encoding="utf-8"), comments=True)
    except (OSError, ValueError) as error:
        problem = error.strerror if isinstance(error, OSError) else f"cannot be read: {error}"
        raise ConfigError(f"{CREDENTIALS_FILE}: {path}: {problem}") from None
    values = {}
    for word in words:
        name, equals, value = word.partition("=")
        if equals:
            values[name] = value
        elif word != "export":  # the word itself may be a secret
            raise ConfigError(f"{CREDENTIALS_FILE}: {path}: lines must be NAME=value")
    prefix = _PREFIXES.get(scheme, "\0")
    return {
        name: value
        for name, value in values.items()
        if name.startswith(prefix) and name not in _NO_OPTIONS
    }


def refuse_fork(uri: str) -> None:
    """ConfigError in a fork of a process that has used obstore: it would never get an answer."""
    _used_by.add(os.getpid())
    if _used_by != {os.getpid()}:
        raise ConfigError(
            f"{uri}: the process was forked after the build was opened, and object stores cannot "
            "be read in a fork; give the DataLoader multiprocessing_context='spawn' (or "
            "'forkserver'), or open the build in the worker"
        )
