"""Credentials that expire in the middle of an epoch: new ones are taken, or one line says so in
time.
"""

import threading

import pytest

from isobatch.common.errors import DataError
from support.builds.remote_builds import IN_EVERY_STORE
from support.loading.contents import content
from support.loading.fault_runs import NAMED, fails, gives
from support.stores.expiring import Issuer, use_file, write_variables

pytestmark = [pytest.mark.server, pytest.mark.usefixtures("little_ahead")]

LIMIT_S = 1.0
LATE_S = 0.5
ENDS_S = 6
"""Enough for a busy machine to open a build and make a step."""


@pytest.fixture
def credentials(tmp_path):
    return tmp_path / "credentials"


@pytest.fixture
def issuer(store, proxy, credentials, monkeypatch):
    issuer = Issuer(store, proxy)
    use_file(monkeypatch, issuer, proxy.endpoint, credentials)
    return issuer


@pytest.mark.parametrize(
    ("store", "workers"), [("s3", 0), ("s3", 2), ("gcs", 2), ("azure", 2)], indirect=["store"]
)
def test_a_file_renewed_before_or_after_the_store_refuses_goes_unnoticed(
    urls, load, expected, issuer, credentials, workers
):
    loader = load(urls["refs"], workers=workers, cache_bytes=0)
    steps = iter(loader)
    found = [content(next(steps))]
    write_variables(credentials, issuer.issue())
    found.append(content(next(steps)))
    late = threading.Timer(LATE_S, write_variables, [credentials, issuer.issue()])
    late.start()
    found += [content(step) for step in steps]
    late.join()
    assert found == expected
    assert issuer.refused > 1


@IN_EVERY_STORE
def test_a_file_that_is_not_renewed_is_said_in_time_and_the_run_resumes_when_it_is(
    urls, store, load, expected, issuer, credentials
):
    loader = load(urls["arrow"], timeout_s=LIMIT_S, cache_bytes=0)
    steps = iter(loader)
    assert content(next(steps)) == expected[0]
    renewed = issuer.issue()
    what = {
        "s3": r"the credentials have expired \(ExpiredToken\): set new AWS_ACCESS_KEY_ID",
        "gs": r"the store refuses the credentials \(AuthenticationRequired\): check GOOGLE_APP",
        "az": r"the credentials have expired \(AuthenticationFailed\): set new AZURE_STORAGE_ACC",
    }[store.scheme]
    message = rf"{NAMED}.*not read within 1 s \(last: {what}"
    state, given = fails(loader, steps, expected[1:], DataError, message, LIMIT_S + 4)
    with pytest.raises(DataError, match=what):  # a run that begins is told at once
        load(urls["arrow"], timeout_s=60)
    write_variables(credentials, renewed)
    loader.load_state_dict(state)
    assert gives(loader, expected, given + 1)


@pytest.mark.parametrize("store", ["azure"], indirect=True)
def test_a_token_that_the_server_itself_lets_expire_is_renewed(
    urls, store, load, expected, proxy, credentials, monkeypatch
):
    """Without the proxy's refusal: Azurite compares the token's end with its clock."""
    use_file(monkeypatch, Issuer(store, proxy), proxy.endpoint, credentials)
    proxy.refusal = lambda *_: None
    write_variables(credentials, {"AZURE_STORAGE_SAS_TOKEN": store.sas_token(ENDS_S)})
    ended = threading.Event()
    timer = threading.Timer(ENDS_S, ended.set)
    timer.start()
    loader = load(urls["refs"], cache_bytes=0)
    steps = iter(loader)
    found = [content(next(steps))]
    proxy.fault = lambda path: ended.wait() and ""
    write_variables(credentials, {"AZURE_STORAGE_SAS_TOKEN": store.sas_token(600)})
    found += [content(step) for step in steps]
    timer.join()
    assert found == expected
    assert 403 in proxy.statuses
