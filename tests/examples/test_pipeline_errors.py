"""The pipeline example, when something goes wrong while it runs: one line, and status 1; wrong options, status 2."""

import contextlib
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path[:0] = [
    str(EXAMPLES),
    *(str(Path(__file__).parents[1] / part) for part in ("loaders", "engine/runtime")),
]

from sample_tables import write_tabled  # noqa: E402
from shard_fixture import group_samples, make_samples  # noqa: E402
from train_pipeline import main  # noqa: E402
from tuned_ranks import stated_profile  # noqa: E402

DEADLINE_S = 60

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def build(tmp_path_factory):
    return write_tabled(tmp_path_factory.mktemp("packed") / "build", group_samples(make_samples(60)))


@pytest.fixture(scope="module")
def profile(tmp_path_factory):
    path = tmp_path_factory.mktemp("profile") / "profile.json"
    stated_profile(path)
    return path


@pytest.fixture
def alone():
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("what", ["figures", "trace"])
def test_a_full_disk_is_told_in_one_line(build, what, capsys, alone):
    assert main([str(build), "--plan=auto", "--steps=2", "--device=cpu", f"--{what}=/dev/full"]) == 1
    assert capsys.readouterr().err == "/dev/full: No space left on device\n"


def test_a_build_that_is_damaged_while_it_is_read_is_told_in_one_line(tmp_path, capsys, alone):
    build = write_tabled(tmp_path / "build", group_samples(make_samples(30)))
    (shard,) = (build / "shards").iterdir()
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 0xFF
    shard.write_bytes(content)
    assert main([str(build), "--plan=auto", "--steps=20", "--device=cpu"]) == 1
    error = capsys.readouterr().err
    assert shard.name in error
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tune"], "--tune needs --profile"),
        (["--profile={profile}"], "--tune needs --profile"),
        (["--encode=own"], "--tune needs --profile"),
        (["--tune", "--profile=none.json"], "none.json: not a profile"),
        (["--tune", "--profile={profile}", "--encode=own"], "the first layer (patch_embedding) is trained"),
        (["--tune", "--profile={profile}", "--effort=-1"], "effort -1"),
        (["--dp=0"], "--dp is 0"),
    ],
)
def test_options_that_do_not_go_together_are_told_in_one_line(build, profile, options, message, capsys, alone):
    named = [option.format(profile=profile) for option in options]
    assert main([str(build), "--plan=auto", "--device=cpu", *named]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1


def test_a_rank_that_is_lost_ends_the_other_with_one_line(build, tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    figures = tmp_path / "figures.jsonl"
    options = ["--plan=auto", "--steps=100000", "--device=cpu", f"--figures={figures}"]
    command = [sys.executable, str(EXAMPLES / "train_pipeline.py"), str(build), *options]
    with contextlib.ExitStack() as stack:
        error = stack.enter_context((tmp_path / "error.txt").open("w"))
        ranks = []
        for rank in ("0", "1"):
            environment = os.environ | shared | {"RANK": rank, "LOCAL_RANK": rank, "GLOO_SOCKET_IFNAME": "lo"}
            process = subprocess.Popen(
                command, env=environment, stdout=subprocess.DEVNULL, stderr=error if rank == "0" else subprocess.DEVNULL
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            ranks.append(process)
        deadline = time.monotonic() + DEADLINE_S
        while not figures.exists() or len(figures.read_text().splitlines()) < 2:
            assert ranks[0].poll() is None, "the run ended by itself"
            assert time.monotonic() < deadline, "no step was trained in time"
            time.sleep(0.01)
        ranks[1].kill()
        assert ranks[0].wait(DEADLINE_S) == 1
    (line,) = (tmp_path / "error.txt").read_text().splitlines()
    assert "rank 0 stops, for rank 1 does not answer any more" in line
