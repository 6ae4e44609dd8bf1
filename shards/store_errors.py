"""What an object store answers when it refuses -> what a reader needs to know: try again, or say
what to do.
"""

from __future__ import annotations

from dataclasses import dataclass

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

_ENDPOINTS = {"s3": "the network and AWS_ENDPOINT_URL", "gs": "the network", "az": "the network"}


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
    status = status_of(message)
    if names_no_bucket(message):
        return Refusal(NO_SUCH_BUCKET)
    if isinstance(error, FileNotFoundError) or status in {404, 410}:
        return Refusal("is missing", is_missing=True)
    if status == 416:
        return Refusal("ends before the range that was asked for", is_past_end=True)
    variables = CREDENTIALS.get(scheme, "the URL")
    if problem := identity_problem(message, variables):
        return Refusal(problem)
    if status == 403:
        return Refusal(
            f"access denied ({code_of(message) or status}): check {variables} and their right to read"
        )
    return _server(scheme, status, message)


def _server(scheme: str, status: int, message: str) -> Refusal:
    code, network = code_of(message), _ENDPOINTS.get(scheme, "the network and the URL")
    if "range" in message.lower() and "not supported" in message.lower():
        return Refusal("the server ignores byte ranges; serve the build from one that honours them")
    if 300 <= status < 400:
        return Refusal(WRONG_REGION)
    if is_passing(status):
        return Refusal(
            f"the store fails ({status} {code}".rstrip() + "): check its health", is_passing=True
        )
    if status:
        return Refusal(f"the store answers {status} {code}".rstrip())
    return Refusal(f"cannot be reached ({cause_of(message)}): check {network}", is_passing=True)
