"""What an object store answers when it refuses: status, code and cause, out of the text of an
obstore error. Pure.

For packer and loaders, which turn them into their own errors. obstore puts all of it into the text
of a few exception types, so the text is what is read here.
"""

from __future__ import annotations

import re

CREDENTIALS = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS",
    "az": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
}
"""Scheme of a URI -> the variables that credentials come from."""
WRONG_REGION = "the bucket is in another region: set AWS_REGION"
NO_SUCH_BUCKET = "no such bucket: create it, or correct the name"

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
_METADATA_SERVICE = ("169.254.169.254", "metadata.google.internal")
_BUSY = frozenset({408, 425, 429})


def status_of(message: str) -> int:
    """HTTP status of a refusal; 0 if there was no answer.

    >>> status_of("Server returned non-2xx status code: 503 Service Unavailable"), status_of("Connection refused")
    (503, 0)
    """
    match = re.search(r"(?:non-2xx status code: |\(code: )(\d{3})", message)
    return int(match[1]) if match else 0


def code_of(message: str) -> str:
    """The store's own code, such as `AccessDenied`; empty if it sent none.

    >>> code_of("403 Forbidden: <Error><Code>AccessDenied</Code></Error>")
    'AccessDenied'
    """
    match = re.search(r"<Code>(\w+)</Code>", message)
    return match[1] if match else ""


def cause_of(message: str) -> str:
    """The operating system's or the resolver's own words, which obstore hides in its debug text."""
    for pattern in (
        r'message: \\?"([^"\\]+)',
        r"(failed to lookup address information[^\"\\]*)",
        r"(TimedOut)",
    ):
        if match := re.search(pattern, message):
            return match[1].strip()
    return message.strip().partition("\n")[0].rpartition(" - ")[2]


def names_no_bucket(message: str) -> bool:
    """Whether there is no such bucket."""
    return any(mark in message for mark in _NO_BUCKET)


def identity_problem(message: str, variables: str) -> str | None:
    """What is wrong with the credentials, which come from `variables`, if the store does not know
    who asks.
    """
    if any(host in message.partition("\n")[0] for host in _METADATA_SERVICE):
        # a cloud's own machines are asked for credentials when there are none in the environment
        return f"no credentials: set {variables}"
    status, code = status_of(message), code_of(message)
    if status == 401 or code in _BAD_CREDENTIALS:
        return f"the store refuses the credentials ({code or status}): check {variables}"
    return None


def is_passing(status: int) -> bool:
    """Whether the same request may succeed later."""
    return status >= 500 or status in _BUSY
