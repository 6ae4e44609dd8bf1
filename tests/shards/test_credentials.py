"""Credentials of object stores: files, sources of their own, ends in the middle of a build, and one
line per mistake.
"""

import contextlib
import datetime
import http.server
import json
import threading

import pytest

from isobatch.common.errors import ConfigError, DataError
from isobatch.shards.folders import open_folder, open_object_folder
from isobatch.shards.object_folder import ObjectFolder
from support.builds.packed import build, digests
from support.builds.raw_data import good_records, write_dataset
from support.builds.remote_builds import IN_EVERY_STORE, upload, use
from support.servers import FaultyProxy
from support.stores.expiring import Issuer, use_file, write_variables

pytestmark = pytest.mark.server

EVERY = 15
"""Requests after which a test's credentials expire."""


@pytest.fixture(autouse=True)
def _forget_roots(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for function in (open_folder, open_object_folder):
        function.cache_clear()
    yield
    for function in (open_folder, open_object_folder):
        function.cache_clear()


@pytest.fixture
def proxy(store):
    with contextlib.closing(FaultyProxy(store.endpoint)) as proxy:
        yield proxy


@IN_EVERY_STORE
def test_a_build_whose_credentials_expire_again_and_again_is_the_same(
    store, proxy, tmp_path, monkeypatch
):
    raw = write_dataset(tmp_path / "raw", good_records(tmp_path / "raw", 30))
    build(raw, tmp_path / "local")
    upload(store, raw, f"{tmp_path.name}/raw")
    issuer, file = Issuer(store, proxy), tmp_path / "credentials"
    use_file(monkeypatch, issuer, proxy.endpoint, file)
    lock = threading.Lock()

    def expire(path):
        with lock:
            if not len(proxy.requests) % EVERY:
                write_variables(file, issuer.issue())
        return ""

    proxy.fault = expire
    place = f"{store.uri}/{tmp_path.name}"
    build(f"{place}/raw", f"{place}/out")
    out = open_folder(f"{place}/out")
    for info in out.files():
        if info.name != "report.html":
            (tmp_path / "down" / info.name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "down" / info.name).write_bytes(out.read(info.name))
    assert digests(tmp_path / "down") == digests(tmp_path / "local")
    assert issuer.refused > 2


@IN_EVERY_STORE
def test_each_kind_of_request_takes_new_credentials(store, proxy, tmp_path, monkeypatch):
    issuer, file = Issuer(store, proxy), tmp_path / "credentials"
    use_file(monkeypatch, issuer, proxy.endpoint, file)
    folder = ObjectFolder(f"{store.uri}/{tmp_path.name}")
    calls = [
        lambda: folder.put("a", b"0123"),
        lambda: folder.create("b", b"x"),
        lambda: folder.info("a").size,
        lambda: folder.read("a", 1, 2),
        lambda: folder.open("a").read(),
        folder.names,
        lambda: len([*folder.files()]),
        lambda: folder.has_folder(""),
        lambda: folder.delete(["a"]),
        folder.names,
    ]
    assert folder.names() == []
    answers = []
    for number, call in enumerate(calls):
        write_variables(file, issuer.issue())
        answers.append(call())
        assert issuer.refused == number + 1
    answered = [None, True, 4, b"12", b"0123", ["a", "b"], 2, True, None, ["b"]]
    assert answers == answered


@IN_EVERY_STORE
def test_credentials_that_nobody_renews_are_one_line(store, proxy, tmp_path, monkeypatch):
    monkeypatch.setattr("isobatch.shards.object_folder._RENEWAL_S", 0.2)
    issuer, file = Issuer(store, proxy), tmp_path / "credentials"
    use_file(monkeypatch, issuer, proxy.endpoint, file)
    uri = f"{store.uri}/{tmp_path.name}"
    folder = ObjectFolder(uri)
    folder.put("a", b"0123")
    renewed = issuer.issue()
    what = "refuses the credentials" if store.scheme == "gs" else "the credentials have expired"
    for call in (folder.names, lambda: folder.read("a"), lambda: folder.put("b", b"x")):
        with pytest.raises(DataError, match=rf"^{uri}: .*{what} \(") as error:
            call()
        assert "\n" not in str(error.value)
    write_variables(file, renewed)
    assert folder.names() == ["a"]


class _Source(http.server.BaseHTTPRequestHandler):
    """Credentials of a machine, as AWS's container agent and Google's metadata server give them."""

    issuer: Issuer

    def do_GET(self):
        values = self.issuer.issue()
        if "computeMetadata" in self.path:
            answer = {"access_token": values["GOOGLE_BEARER_TOKEN"], "expires_in": 3600}
        else:
            end = datetime.datetime.now(datetime.UTC) + datetime.timedelta(hours=1)
            answer = {
                "AccessKeyId": values["AWS_ACCESS_KEY_ID"],
                "SecretAccessKey": values["AWS_SECRET_ACCESS_KEY"],
                "Token": "",
                "Expiration": f"{end:%Y-%m-%dT%H:%M:%SZ}",
            }
        content = json.dumps(answer).encode()
        self.send_response_only(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_):
        pass


@pytest.mark.parametrize("store", ["s3", "gcs"], indirect=True)
def test_the_machines_own_source_is_asked_again_when_the_store_refuses(
    store, proxy, tmp_path, monkeypatch
):
    """Before the end that it gave, too."""
    issuer = Issuer(store, proxy)
    use_file(monkeypatch, issuer, proxy.endpoint, tmp_path / "none")
    monkeypatch.delenv("ISOBATCH_CREDENTIALS_FILE")
    handler = type("Handler", (_Source,), {"issuer": issuer})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as source:
        threading.Thread(target=source.serve_forever, args=(0.05,), daemon=True).start()
        place = f"127.0.0.1:{source.server_port}"
        monkeypatch.setenv("GCE_METADATA_HOST", place)
        monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"http://{place}/credentials")
        (tmp_path / "token").write_text("of the pod")
        monkeypatch.setenv("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", str(tmp_path / "token"))
        folder = ObjectFolder(f"{store.uri}/{tmp_path.name}")
        folder.put("a", b"0123")
        assert issuer.refused == 0
        issuer.issue()
        assert folder.read("a") == b"0123"
        assert issuer.refused == 1
        source.shutdown()


NO_FILE = "no such file"
FILES = {
    NO_FILE: (None, "No such file or directory"),
    "not variables": ("aws_access_key_id: AKIA", "lines must be NAME=value"),
    "an open quote": ("AWS_ACCESS_KEY_ID='AKIA", "cannot be read: No closing quotation"),
}


@pytest.mark.parametrize("mistake", FILES)
def test_a_credentials_file_that_cannot_be_used_is_one_line(tmp_path, monkeypatch, mistake):
    text, expected = FILES[mistake]
    path = tmp_path / "credentials"
    if text is not None:
        path.write_text(text)
    monkeypatch.setenv("ISOBATCH_CREDENTIALS_FILE", str(path))
    with pytest.raises(ConfigError) as error:
        ObjectFolder("s3://packed/x").names()
    assert str(error.value) == f"ISOBATCH_CREDENTIALS_FILE: {path}: {expected}"


def test_a_file_may_hold_comments_other_stores_and_what_awss_tool_prints(
    store, tmp_path, monkeypatch
):
    use(monkeypatch, store)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    path = tmp_path / "credentials"
    path.write_text(
        f"# of the tests\nexport AWS_ACCESS_KEY_ID={store.access_key}\n"
        f'AWS_SECRET_ACCESS_KEY="{store.secret_key}"\nGOOGLE_BEARER_TOKEN=x\n'
        "AWS_CREDENTIAL_EXPIRATION=2026-11-28T05:00:00+00:00\n"
    )
    monkeypatch.setenv("ISOBATCH_CREDENTIALS_FILE", str(path))
    assert ObjectFolder(f"{store.uri}/{tmp_path.name}").names() == []


def _unset(*names):
    def change(monkeypatch, store, tmp_path):
        for name in names:
            monkeypatch.delenv(name)
        # no machine of a cloud: nothing listens there
        monkeypatch.setenv("GCE_METADATA_HOST", "127.0.0.1:9")
        monkeypatch.setenv("AZURE_MSI_ENDPOINT", "http://127.0.0.1:9/metadata/identity/token")

    return change


def _set(name, value):
    return lambda monkeypatch, store, tmp_path: monkeypatch.setenv(name, value)


def _google_file(text):
    def change(monkeypatch, store, tmp_path):
        monkeypatch.delenv("GOOGLE_BEARER_TOKEN")
        (tmp_path / "key.json").write_text(text)
        monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "key.json"))

    return change


SET_GOOGLE = "set GOOGLE_APPLICATION_CREDENTIALS"
SET_AZURE = "set AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY"
MISTAKES = {
    "gs, none": ("gcs", _unset("GOOGLE_BEARER_TOKEN"), "packed", f"no credentials: {SET_GOOGLE}"),
    "gs, a broken file": ("gcs", _google_file("{"), "packed", f"Unable to decode .*{SET_GOOGLE}"),
    "gs, a key without its parts": (
        *("gcs", _google_file('{"type": "service_account"}'), "packed"),
        f"missing field `private_key`: {SET_GOOGLE}",
    ),
    "az, none": (
        *("azure", _unset("AZURE_STORAGE_ACCOUNT_KEY"), "packed", f"no credentials: {SET_AZURE}"),
    ),
    "az, no account": (
        *("azure", _unset("AZURE_STORAGE_ACCOUNT_NAME"), "packed"),
        f"Account must be specified: {SET_AZURE}",
    ),
    "az, no key": (
        *("azure", _set("AZURE_STORAGE_ACCOUNT_KEY", "no key!"), "packed"),
        f"Invalid Access Key.*{SET_AZURE}",
    ),
    "az, no such account": (
        *("azure", lambda patch, store, _: use(patch, store, f"{store.endpoint}/other"), "packed"),
        "the store answers 40",
    ),
    "az, no name": (
        *("azure", lambda *_: None, "Odd_Name"),
        r"no container can have such a name \(InvalidResourceName\)",
    ),
}


@pytest.mark.parametrize(
    ("store", "change", "bucket", "expected"), MISTAKES.values(), ids=MISTAKES, indirect=["store"]
)
def test_credentials_that_cannot_be_used_are_one_line(
    store, tmp_path, monkeypatch, change, bucket, expected
):
    use(monkeypatch, store)
    change(monkeypatch, store, tmp_path)
    uri = f"{store.scheme}://{bucket}/x"
    with pytest.raises((ConfigError, DataError), match=rf"^{uri}: .*{expected}") as error:
        ObjectFolder(uri).names()
    assert "\n" not in str(error.value)
