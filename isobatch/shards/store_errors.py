"""Errors of object stores: what a store answers -> one line for the user.

obstore puts status, code and cause into the text of a few exception types: it is read here. Pure.
"""

import errno
import re
from dataclasses import dataclass

from isobatch.common.errors import ConfigError, DataError, first_line

CREDENTIALS_FILE = "ISOBATCH_CREDENTIALS_FILE"
"""Variable that names a file of variables, read again when the store refuses the credentials."""
CREDENTIALS = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS",
    "az": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
}
"""Scheme of a URI -> variables that credentials come from."""
_ENDPOINTS = {"s3": "AWS_ENDPOINT_URL", "gs": "GOOGLE_BASE_URL", "az": "AZURE_STORAGE_ENDPOINT"}
"""Scheme of a URI -> variable that names another server than the provider's own."""
_WRONG_REGION = "the bucket is in another region: set AWS_REGION"
_NO_SUCH_BUCKET = "no such {}: create it, or correct the name"
_BUCKET_CODES = (
    *("<Code>NoSuchBucket", "<Code>ContainerNotFound"),
    *("specified bucket does not exist", "specified container does not exist"),
)
_CREDENTIAL_CODES = (
    *("AuthenticationFailed", "AuthorizationHeaderMalformed", "InvalidAccessKeyId"),
    *("InvalidToken", "RequestTimeTooSkewed", "SignatureDoesNotMatch"),
)
"""Codes of S3 and Azure; some stores send them with status 400."""
_EXPIRED_CODES = ("ExpiredToken", "TokenRefreshRequired")
_EXPIRED_TEXT = "Signature not valid in the specified time frame"
"""What Azure says of a SAS token."""
_UNKNOWN_TEXT = "Server failed to authenticate the request"
"""What Azure says of a wrong key; its servers differ in the code."""
_CAUSES = (r'message: \\?"([^"\\]+)', r'(failed to lookup address[^"\\]*)', "(TimedOut)")
_METADATA_SERVICE = (
    "/latest/api/token",
    "/latest/meta-data/",
    "/computeMetadata/",
    "/metadata/identity/",
)
"""Paths at which machines of AWS, Google and Azure have credentials."""
_TOKEN_REQUEST = "Error performing token request"
_NAME_CODES = ("InvalidBucketName", "InvalidResourceName")
_BUSY = frozenset({408, 425, 429})
PAST_END = 416
"""Status for a range after the end of an object, and for any range of an empty one."""


def status_of(message: str) -> int:
    """HTTP status of a refusal; 0 if there was no answer.

    >>> status_of("Server returned non-2xx status code: 503 Service Unavailable")
    503
    """
    match = re.search(r"(?:non-2xx status code: |\(code: )(\d{3})", message)
    return int(match[1]) if match else 0


def _code_of(message: str) -> str:
    """The store's own code, such as `AccessDenied`; empty if it sent none.

    >>> _code_of("403 Forbidden: <Error><Code>AccessDenied</Code></Error>")
    'AccessDenied'
    """
    match = re.search(r"<Code>(\w+)</Code>", message)
    return match[1] if match else ""


def _reason(message: str) -> str:
    return _code_of(message) or str(status_of(message))


def _answer(message: str) -> str:
    return f"{status_of(message)} {_code_of(message)}".rstrip()


def _cause_of(message: str) -> str:
    """The operating system's or the resolver's own words, which obstore hides in its debug text."""
    for pattern in _CAUSES:
        if match := re.search(pattern, message):
            return match[1].strip()
    return message.strip().partition("\n")[0].rpartition(" - ")[2]


def _scheme(uri: str) -> str:
    return uri.partition("://")[0]


def _bucket_word(uri: str) -> str:
    return "container" if _scheme(uri) == "az" else "bucket"


def _identity_problem(message: str, variables: str) -> str | None:
    """What is wrong with the credentials in `variables`, if the store does not know who asks."""
    first = message.partition("\n")[0]
    if any(path in first for path in _METADATA_SERVICE):
        # a cloud's own machines are asked for credentials when there are none in the environment
        return f"no credentials: set {variables}"
    if _TOKEN_REQUEST in first:
        problem = _reason(message) if status_of(message) else _cause_of(message)
        return f"no token for the credentials ({problem}): check {variables}"
    if _code_of(message) in _EXPIRED_CODES or _EXPIRED_TEXT in message:
        return (
            f"the credentials have expired ({_reason(message)}): set new {variables}, or let "
            f"{CREDENTIALS_FILE} name a file that is renewed"
        )
    is_unknown = _code_of(message) in _CREDENTIAL_CODES or _UNKNOWN_TEXT in message
    if is_unknown or status_of(message) == 401:
        return f"the store refuses the credentials ({_reason(message)}): check {variables}"
    return None


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request failed."""

    text: str
    """What is wrong and what to do, without the name of the object or place."""
    is_of_place: bool = False
    """Whether the whole place cannot be used: bucket, credentials, or no way to reach it."""
    is_of_credentials: bool = False
    """Whether the store does not know who asks: the credentials are wrong, or have expired."""
    is_passing: bool = False
    """Whether the same request may succeed later."""
    is_missing: bool = False
    """Whether there is no such object."""
    is_damage: bool = False
    """Whether an answer came, with wrong bytes."""
    is_past_end: bool = False
    """Whether the object is shorter than the range that was asked for."""


def explain(uri: str, error: Exception) -> Refusal:
    """What an error of obstore's means."""
    message = str(error)
    status = status_of(message)
    variables = CREDENTIALS.get(_scheme(uri), "the URL")
    if any(code in message for code in _BUCKET_CODES):
        return Refusal(_NO_SUCH_BUCKET.format(_bucket_word(uri)), is_of_place=True)
    if isinstance(error, FileNotFoundError) or status in {404, 410}:
        return Refusal("is missing", is_missing=True)
    if status == PAST_END:
        return Refusal("ends before the range that was asked for", is_past_end=True)
    if problem := _identity_problem(message, variables):
        passing = _TOKEN_REQUEST in message and not 400 <= status < 500
        return Refusal(problem, is_of_place=True, is_of_credentials=True, is_passing=passing)
    if status == 403:
        advice = f"check {variables} and their right to read"
        return Refusal(f"access denied ({_reason(message)}): {advice}")
    return _explain_server(uri, status, message)


def _explain_server(uri: str, status: int, message: str) -> Refusal:
    if "range" in message.lower() and "not supported" in message.lower():
        return Refusal("the server ignores byte ranges; serve the build from one that honours them")
    if 300 <= status < 400:
        return Refusal(_WRONG_REGION, is_of_place=True)
    if status >= 500 or status in _BUSY:
        advice = "check its health, or try again when it has recovered"
        text = f"the store fails ({_answer(message)}): {advice}"
    elif _code_of(message) in _NAME_CODES:
        text = f"no {_bucket_word(uri)} can have such a name ({_code_of(message)})"
        return Refusal(text, is_of_place=True)
    elif status:
        return Refusal(f"the store answers {_answer(message)}")
    else:
        endpoint = _ENDPOINTS.get(_scheme(uri), "the URL")
        text = f"cannot be reached ({_cause_of(message)}): check the network and {endpoint}"
    return Refusal(text, is_of_place=True, is_passing=True)


def no_obstore(uri: str) -> ConfigError:
    """The package is missing."""
    return ConfigError(f"{uri}: object stores need obstore: pip install obstore")


def wrong_options(uri: str, error: Exception) -> ConfigError:
    """The environment's settings for the store cannot be used."""
    variables = CREDENTIALS.get(_scheme(uri))
    return ConfigError(f"{uri}: {first_line(error)}" + (f": set {variables}" if variables else ""))


def is_denied(error: Exception) -> bool:
    """Whether the store knows who asks, and does not allow it."""
    return status_of(str(error)) == 403 and not is_unknown(error)


def is_unknown(error: Exception) -> bool:
    """Whether the store does not know who asks: the credentials are wrong, or have expired."""
    return _identity_problem(str(error), "") is not None


def is_unexplained(error: Exception) -> bool:
    """Whether the store refuses without a reason, as it does where it may send no body (HEAD)."""
    message = str(error)
    return status_of(message) in {400, 403} and not _code_of(message)


def place_problem(uri: str, error: Exception) -> DataError | None:
    """What is wrong with the whole place, if the error says so."""
    refusal = explain(uri, error)
    return DataError(f"{uri}: {refusal.text}") if refusal.is_of_place else None


def denied(uri: str, error: Exception) -> DataError:
    """Access denied to a place that cannot be listed either."""
    return DataError(
        f"{uri}: access denied ({_reason(str(error))}): check {CREDENTIALS[_scheme(uri)]}; they "
        "need the right to list the bucket too, without which a store does not tell a missing "
        "object from a forbidden one"
    )


def object_problem(name: str, error: Exception) -> OSError:
    """What is wrong with one object."""
    message = str(error)
    if status_of(message) in {401, 403}:
        return PermissionError(errno.EACCES, f"access denied ({_reason(message)})", name)
    if status_of(message) == 412:
        return OSError(errno.ESTALE, "was replaced while it was read", name)
    return OSError(errno.EIO, f"the store answers {_answer(message)}", name)


def list_problem(uri: str, error: Exception) -> DataError:
    """Why a place could not be listed."""
    refusal = explain(uri, error)
    if refusal.is_of_place:
        return DataError(f"{uri}: {refusal.text}")
    text = f"the store answers {_answer(str(error))}" if refusal.is_missing else refusal.text
    return DataError(f"{uri}: cannot be listed: {text}")


def write_problem(uri: str, error: Exception) -> DataError:
    """Why something could not be written."""
    if is_denied(error):
        advice = "the credentials need the right to write and delete there"
        return DataError(f"{uri}: access denied ({_reason(str(error))}): {advice}")
    return place_problem(uri, error) or DataError(f"{uri}: cannot be written: {first_line(error)}")
