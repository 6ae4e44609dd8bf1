"""What an object store answers when it refuses -> one line for the user: what, where, what to do.

obstore puts status, code and cause into the text of a few exception types, so the text is what is read here.
"""

from __future__ import annotations

import errno
import re

from balance.errors import DataError

CREDENTIALS = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS",
    "az": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
}
"""Scheme of a URI -> the variables that credentials come from."""
ENDPOINTS = {"s3": "AWS_ENDPOINT_URL", "gs": "GOOGLE_BASE_URL", "az": "AZURE_STORAGE_ENDPOINT"}
"""Scheme of a URI -> the variable that names another server than the provider's own."""

_NO_BUCKET = ("<Code>NoSuchBucket", "<Code>ContainerNotFound", "specified bucket does not exist")
_BAD_CREDENTIALS = frozenset(
    {
        "AuthenticationFailed",
        "AuthorizationHeaderMalformed",
        "ExpiredToken",
        "InvalidAccessKeyId",
        "InvalidToken",
        "RequestTimeTooSkewed",
        "SignatureDoesNotMatch",
        "TokenRefreshRequired",
    }
)
"""Codes of S3 and Azure; some stores send them with status 400."""
_METADATA_SERVICE = re.compile(r"169\.254\.169\.254|metadata\.google\.internal")
"""Asked for credentials when there are none in the environment."""
_BUSY = frozenset({408, 425, 429})


def status_of(error: Exception) -> int:
    """HTTP status of a refusal; 0 if there was no answer."""
    match = re.search(r"(?:non-2xx status code: |\(code: )(\d{3})", str(error))
    return int(match[1]) if match else 0


def is_denied(error: Exception) -> bool:
    """Whether the store knows who asks, and does not allow it."""
    return status_of(error) in {401, 403} and _code(error) not in _BAD_CREDENTIALS and not _unidentified(error)


def place_problem(uri: str, error: Exception) -> DataError | None:
    """What is wrong with the whole place, if the error says so: bucket, credentials, or no way to reach it."""
    scheme = uri.partition("://")[0]
    problem = _identity_problem(CREDENTIALS[scheme], error) or _server_problem(ENDPOINTS[scheme], error)
    return DataError(f"{uri}: {problem}") if problem else None


def _identity_problem(variables: str, error: Exception) -> str | None:
    status, code = status_of(error), _code(error)
    if _unidentified(error):
        return f"no credentials: set {variables}"
    if status == 401 or code in _BAD_CREDENTIALS:
        return f"the store refuses the credentials ({code or status}): check {variables}"
    return None


def _server_problem(variable: str, error: Exception) -> str | None:
    status, code = status_of(error), _code(error)
    if any(mark in str(error) for mark in _NO_BUCKET):
        return "no such bucket: create it, or correct the name"
    if status == 0:
        return f"cannot be reached ({_cause(error)}): check the network and {variable}"
    if status >= 500 or status in _BUSY:
        return f"the store fails ({status} {code}): run the same command again when it has recovered"
    if 300 <= status < 400:
        return "the bucket is in another region: set AWS_REGION"
    return None


def denied(uri: str, error: Exception) -> DataError:
    """Access denied to a place that cannot be listed either."""
    reason, credentials = _code(error) or status_of(error), CREDENTIALS[uri.partition("://")[0]]
    return DataError(
        f"{uri}: access denied ({reason}): check {credentials}; they need the right to list the bucket too, without"
        " which a store does not tell a missing object from a forbidden one"
    )


def object_problem(name: str, error: Exception) -> OSError:
    """What is wrong with one object."""
    status, code = status_of(error), _code(error)
    if status in {401, 403}:
        return PermissionError(errno.EACCES, f"access denied ({code or status})", name)
    if status == 412:
        return OSError(errno.ESTALE, "was replaced while it was read", name)
    return OSError(errno.EIO, f"the store answers {status} {code}".rstrip(), name)


def list_problem(uri: str, error: Exception) -> DataError:
    """Why a place could not be listed."""
    return place_problem(uri, error) or DataError(f"{uri}: cannot be listed: {_first_line(error)}")


def write_problem(uri: str, error: Exception) -> DataError:
    """Why something could not be written."""
    if is_denied(error):
        reason = _code(error) or status_of(error)
        return DataError(f"{uri}: access denied ({reason}): the credentials need the right to write and delete there")
    return place_problem(uri, error) or DataError(f"{uri}: cannot be written: {_first_line(error)}")


def _code(error: Exception) -> str:
    match = re.search(r"<Code>(\w+)</Code>", str(error))
    return match[1] if match else ""


def _unidentified(error: Exception) -> bool:
    return _METADATA_SERVICE.search(_first_line(error)) is not None


def _cause(error: Exception) -> str:
    """The operating system's or the resolver's own words, which obstore hides in its debug text."""
    for pattern in (r'message: \\?"([^"\\]+)', r"(failed to lookup address information[^\"\\]*)", r"(TimedOut)"):
        if match := re.search(pattern, str(error)):
            return match[1].strip()
    return _first_line(error).rpartition(" - ")[2]


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
