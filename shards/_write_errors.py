"""What an object store answers when it refuses -> one line for the user: what, where, what to
do.
"""

from __future__ import annotations

import errno

from balance.errors import DataError, first_line
from shards._store_answers import (
    CREDENTIALS,
    NO_SUCH_BUCKET,
    WRONG_REGION,
    cause_of,
    code_of,
    identity_problem,
    is_passing,
    names_no_bucket,
    status_of,
)

ENDPOINTS = {"s3": "AWS_ENDPOINT_URL", "gs": "GOOGLE_BASE_URL", "az": "AZURE_STORAGE_ENDPOINT"}
"""Scheme of a URI -> the variable that names another server than the provider's own."""


def is_denied(error: Exception) -> bool:
    """Whether the store knows who asks, and does not allow it."""
    return status_of(str(error)) == 403 and identity_problem(str(error), "") is None


def place_problem(uri: str, error: Exception) -> DataError | None:
    """What is wrong with the whole place, if the error says so: bucket, credentials, or no way to
    reach it.
    """
    scheme = uri.partition("://")[0]
    problem = identity_problem(str(error), CREDENTIALS[scheme]) or _server_problem(
        str(error), ENDPOINTS[scheme]
    )
    return DataError(f"{uri}: {problem}") if problem else None


def _server_problem(message: str, variable: str) -> str | None:
    status = status_of(message)
    if names_no_bucket(message):
        return NO_SUCH_BUCKET
    if status == 0:
        return f"cannot be reached ({cause_of(message)}): check the network and {variable}"
    if is_passing(status):
        return f"the store fails ({status} {code_of(message)}): run the same command again when it has recovered"
    if 300 <= status < 400:
        return WRONG_REGION
    return None


def denied(uri: str, error: Exception) -> DataError:
    """Access denied to a place that cannot be listed either."""
    reason, credentials = (
        code_of(str(error)) or status_of(str(error)),
        CREDENTIALS[uri.partition("://")[0]],
    )
    return DataError(
        f"{uri}: access denied ({reason}): check {credentials}; they need the right to list the bucket too, without"
        " which a store does not tell a missing object from a forbidden one"
    )


def object_problem(name: str, error: Exception) -> OSError:
    """What is wrong with one object."""
    status, code = status_of(str(error)), code_of(str(error))
    if status in {401, 403}:
        return PermissionError(errno.EACCES, f"access denied ({code or status})", name)
    if status == 412:
        return OSError(errno.ESTALE, "was replaced while it was read", name)
    return OSError(errno.EIO, f"the store answers {status} {code}".rstrip(), name)


def list_problem(uri: str, error: Exception) -> DataError:
    """Why a place could not be listed."""
    return place_problem(uri, error) or DataError(f"{uri}: cannot be listed: {first_line(error)}")


def write_problem(uri: str, error: Exception) -> DataError:
    """Why something could not be written."""
    if is_denied(error):
        reason = code_of(str(error)) or status_of(str(error))
        return DataError(
            f"{uri}: access denied ({reason}): the credentials need the right to write and delete there"
        )
    return place_problem(uri, error) or DataError(f"{uri}: cannot be written: {first_line(error)}")
