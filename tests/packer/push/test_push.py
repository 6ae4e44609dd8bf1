"""`packer push` against a stand-in of the Hub: what is there, killed and continued, read back."""

import io
import json
import os
import signal
import subprocess
import sys
import threading

import pytest
import yaml
from rich.console import Console

from isobatch.loaders import StreamingLoader
from isobatch.packer.build import Builder
from isobatch.packer.config import BuildConfig
from isobatch.packer.progress import StageProgress
from isobatch.packer.report.figures import make_report
from isobatch.packer.upload import save_html
from isobatch.packer.verify import verify_build
from support.builds.raw_data import good_records, options, write_dataset
from support.stores.hub_server import hub_server

pytestmark = pytest.mark.server
COPY = "copy it here first"
RUN = "import isobatch.packer.push as push; push.FILES_PER_COMMIT = 2; "
RUN += "from isobatch.packer.cli import main; main()"


def command(*arguments, program=RUN, **environment):
    """The `packer` command, with small commits, in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-c", program, *map(str, arguments)],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(process, status=0):
    out, err = process.communicate(timeout=240)
    assert process.returncode == status, out + err
    return out, err


def quiet():
    return StageProgress(Console(file=io.StringIO()))


@pytest.fixture(scope="module")
def build(tmp_path_factory):
    folder = tmp_path_factory.mktemp("built")
    config = options(write_dataset(folder, good_records(folder)), folder / "packed")
    Builder(BuildConfig(**config), quiet()).build()
    save_html(make_report(folder / "packed"), str(folder / "packed"))
    return folder / "packed"


@pytest.fixture
def hub(tmp_path):
    with hub_server() as (hub, environment):
        yield hub, environment | {"HF_HOME": str(tmp_path / "home")}


def test_a_build_is_pushed_whole_with_a_card_and_read_back(build, hub, tmp_path):
    server, environment = hub
    out, _ = ended(command("push", build, "me/packed", "--private", **environment))
    assert out.strip() == f"{environment['HF_ENDPOINT']}/datasets/me/packed"
    files = server.repos["me/packed"]
    local = {str(path.relative_to(build)) for path in build.rglob("*") if path.is_file()}
    assert files.keys() == local | {"README.md"}
    assert all(files[name] == (build / name).read_bytes() for name in files.keys() & local)
    # the manifest comes last
    assert server.commits[-1] == ("The build is complete", ["README.md", "manifest.json"])
    assert all(len(names) <= 2 for _, names in server.commits)
    card = files["README.md"].decode()
    assert yaml.safe_load(card.split("---")[1]) == {"tags": ["isobatch"]}
    totals = json.loads((build / "manifest.json").read_text())["totals"]
    assert f"| samples | {totals['num_packed']:,}, {totals['num_rejected']} rejected |" in card
    assert f"| micro-batches | {totals['num_groups']:,} of at most " in card
    assert "hf download me/packed --repo-type dataset --local-dir packed" in card
    # as the card says
    download = "from huggingface_hub.cli.hf import main; main()"
    into = ("--repo-type", "dataset", "--local-dir", tmp_path / "packed")
    ended(command("download", "me/packed", *into, program=download, **environment))
    assert not verify_build(tmp_path / "packed", quiet(), workers=1).problems
    with StreamingLoader(tmp_path / "packed", workers=0) as loader:
        assert sum(batch.num_samples for step in loader for batch in step) == totals["num_packed"]
    # once more: nothing is sent, and nothing changes
    commits, uploads = len(server.commits), len(server.uploads)
    out, err = ended(command("push", build, "me/packed", "--log", "json", **environment))
    assert (len(server.commits), len(server.uploads)) == (commits, uploads)
    events = [json.loads(line) for line in err.splitlines()]
    told = [(event["event"], event.get("stage"), event.get("done")) for event in events]
    assert told[0] == ("stage", "upload", None)
    assert ("stage_end", "upload", len(files)) in told
    assert events[-2]["result"]["url"] == out.strip()


def test_a_killed_push_goes_on_and_sends_no_file_again(build, hub):
    server, environment = hub
    before = threading.Semaphore(2)
    process = command("push", build, "me/packed", **environment)
    server.before_upload = lambda: (
        before.acquire(blocking=False) or os.kill(process.pid, signal.SIGKILL)
    )
    assert process.wait(timeout=240) == -signal.SIGKILL
    assert "manifest.json" not in server.repos["me/packed"]
    server.before_upload = lambda: None
    ended(command("push", build, "me/packed", **environment))
    assert "manifest.json" in server.repos["me/packed"]
    assert len(set(server.uploads)) == len(server.uploads)


def test_what_cannot_be_pushed_is_told_in_one_line(build, hub, tmp_path):
    server, environment = hub
    _, err = ended(command("push", tmp_path, "me/x", **environment), 1)
    assert "no manifest.json" in err
    assert "me/x" not in server.repos
    _, err = ended(command("push", "s3://bucket/packed", "me/x", **environment), 2)
    assert err == f"error: s3://bucket/packed: packer push takes a build in a folder; {COPY}\n"
    server.repos["me/x"] = {"manifest.json": b"{}"}
    _, err = ended(command("push", build, "me/x", **environment), 2)
    assert err == "error: me/x has another build: push to another name, or delete that one\n"
    _, err = ended(command("push", build, "me/y", **environment | {"HF_TOKEN": "hf_wrong"}), 1)
    assert "401" in err
    assert "log in (hf auth login)" in err
    assert err.count("\n") == 1
    _, err = ended(command("push", build, "a/b/c", **environment), 1)
    assert err.count("\n") == 1
    nowhere = environment | {"HF_ENDPOINT": "http://127.0.0.1:9"}
    _, err = ended(command("push", build, "me/y", **nowhere), 1)
    assert err.count("\n") == 1
