"""Credentials that expire while a store is in use: a proxy takes the last ones that were issued."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from support.servers import FaultyProxy, S3Server, StoreServer
from support.stores.emulators import AzureServer, GcsServer

EXPIRED = {
    "s3": (400, "ExpiredToken", "The provided token has expired."),
    "gs": (401, "AuthenticationRequired", "Authentication required."),
    "az": (403, "AuthenticationFailed", "Signature not valid in the specified time frame"),
}
"""Scheme -> status, code and message for credentials that were right once."""


class Issuer:
    """Issues credentials of a server, and makes a proxy in front of it refuse older ones."""

    def __init__(self, server: StoreServer, proxy: FaultyProxy) -> None:
        self.server = server
        self.number = -1
        self.refused = 0
        self._taken = ""
        proxy.refusal = self._refusal

    def issue(self) -> dict[str, str]:
        """Other credentials than before, as variables; from now on those are refused."""
        self.number += 1
        match self.server:
            case S3Server():
                key = (self.server.access_key, self.server.other_key)[self.number % 2]
                self._taken = f"Credential={key}/"
                return {
                    "AWS_ACCESS_KEY_ID": key,
                    "AWS_SECRET_ACCESS_KEY": self.server.secret_key,
                }
            case GcsServer():
                self._taken = f"token-{self.number}"
                self.server.tokens.add(self._taken)
                return {"GOOGLE_BEARER_TOKEN": self._taken}
            case AzureServer():
                token = self.server.sas_token(3600 + 60 * self.number)
                self._taken = parse_qs(token)["se"][0]
                return {"AZURE_STORAGE_SAS_TOKEN": token}
        raise TypeError(self.server)

    def _refusal(self, path: str, authorization: str) -> tuple[int, str] | None:
        if self._taken in f"{path} {authorization}":
            return None
        self.refused += 1
        status, code, message = EXPIRED[self.server.scheme]
        return status, f"<Error><Code>{code}</Code><Message>{message}</Message></Error>"


def write_variables(path: Path, values: dict[str, str]) -> None:
    """Replace a credentials file at once."""
    new = path.with_suffix(".new")
    new.write_text("".join(f"export {name}='{value}'\n" for name, value in values.items()))
    new.replace(path)


def use_file(monkeypatch: Any, issuer: Issuer, endpoint: str, path: Path) -> None:
    """Lead clients to a proxy, by credentials of a file and no others; issues the first."""
    values = issuer.issue()
    others = [*values, "AZURE_STORAGE_ACCOUNT_KEY"]
    for name, value in issuer.server.variables(endpoint).items():
        if name not in others:
            monkeypatch.setenv(name, value)
    for name in others:
        if name in os.environ:
            monkeypatch.delenv(name)
    write_variables(path, values)
    monkeypatch.setenv("ISOBATCH_CREDENTIALS_FILE", str(path))
