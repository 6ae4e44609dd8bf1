"""What an object store answers when it refuses -> what a reader needs to know: try again, or say what to do.

obstore puts status, code and cause into the text of a few exception types, so the text is what is read here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_CREDENTIALS = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS",
    "az": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
}
"""Scheme of a URI -> the variables that credentials come from."""
_ENDPOINTS = {"s3": "the network and AWS_ENDPOINT_URL", "gs": "the network", "az": "the network"}
_BUSY = frozenset({408, 425, 429})
_REFUSALS = frozenset(
    {
        *("AuthenticationFailed", "AuthorizationHeaderMalformed", "ExpiredToken", "InvalidAccessKeyId"),
        *("InvalidToken", "RequestTimeTooSkewed", "SignatureDoesNotMatch", "TokenRefreshRequired"),
    }
)
"""Codes for credentials that are not valid; some stores send them with status 400."""
_NO_BUCKET = ("<Code>NoSuchBucket", "<Code>ContainerNotFound", "specified bucket does not exist")
_METADATA_SERVICE = ("169.254.169.254", "metadata.google.internal")
"""Asked for credentials when there are none in the environment."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request failed."""

    text: str
    """What is wrong and what to do, without the object's name."""
    is_passing: bool = False
    """Whether the same request may succeed later."""
    is_missing: bool = False
    """Whether there is no such object."""
    is_past_end: bool = False
    """Whether the object is shorter than the range that was asked for."""


def explain(scheme: str, error: Exception) -> Refusal:
    """What an error of obstore's for a URI with `scheme` means."""
    message = str(error)
    status, code = _status(message), _code(message)
    if any(mark in message for mark in _NO_BUCKET):
        return Refusal("no such bucket: create it, or correct the name")
    if isinstance(error, FileNotFoundError) or status in {404, 410}:
        return Refusal("is missing", is_missing=True)
    if status == 416:
        return Refusal("ends before the range that was asked for", is_past_end=True)
    return _identity(scheme, status, code, message) or _server(scheme, status, code, message)


def _identity(scheme: str, status: int, code: str, message: str) -> Refusal | None:
    variables = _CREDENTIALS.get(scheme, "the URL")
    if any(host in message.partition("\n")[0] for host in _METADATA_SERVICE):
        return Refusal(f"no credentials: set {variables}")
    if status == 401 or code in _REFUSALS:
        return Refusal(f"the store refuses the credentials ({code or status}): check {variables}")
    if status == 403:
        return Refusal(f"access denied ({code or status}): check {variables} and their right to read")
    return None


def _server(scheme: str, status: int, code: str, message: str) -> Refusal:
    network = _ENDPOINTS.get(scheme, "the network and the URL")
    if "range" in message.lower() and "not supported" in message.lower():
        return Refusal("the server ignores byte ranges; serve the build from one that honours them")
    if 300 <= status < 400:
        return Refusal("the bucket is in another region: set AWS_REGION")
    if status >= 500 or status in _BUSY:
        return Refusal(f"the store fails ({status} {code}".rstrip() + "): check its health", is_passing=True)
    if status:
        return Refusal(f"the store answers {status} {code}".rstrip())
    return Refusal(f"cannot be reached ({_cause(message)}): check {network}", is_passing=True)


def _status(message: str) -> int:
    """HTTP status of a refusal; 0 if there was no answer.

    >>> _status("Server returned non-2xx status code: 503 Service Unavailable"), _status("Connection refused")
    (503, 0)
    """
    match = re.search(r"(?:non-2xx status code: |\(code: )(\d{3})", message)
    return int(match[1]) if match else 0


def _code(message: str) -> str:
    match = re.search(r"<Code>(\w+)</Code>", message)
    return match[1] if match else ""


def _cause(message: str) -> str:
    """The operating system's or the resolver's own words, which obstore hides in its debug text."""
    for pattern in (r'message: \\?"([^"\\]+)', r"(failed to lookup address information[^\"\\]*)", r"(TimedOut)"):
        if match := re.search(pattern, message):
            return match[1].strip()
    return message.strip().partition("\n")[0].rpartition(" - ")[2]
