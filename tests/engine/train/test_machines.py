"""Several machines: the page's command with two agents of torchrun here, and its Slurm script."""

import json
import shlex
import socket
import subprocess

import pytest

from support import ROOT
from support.builds.sample_tables import write_tabled
from support.builds.shard_fixture import group_samples, make_samples
from support.pages.blocks import blocks_of
from support.ranks import launch, start

STEPS, DEADLINE_S = 3, 180
COMMAND, SLURM = (
    block.code for block in blocks_of(ROOT / "docs/train.md") if block.mark == "machines"
)


@pytest.mark.slow
def test_two_agents_train_as_one_does(tmp_path):
    build = write_tabled(tmp_path / "build", group_samples(make_samples(40)))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = shlex.split(COMMAND.replace("\\\n", "").replace("node0:29500", f"localhost:{port}"))
    assert words[0] == "torchrun"
    words[words.index("--nproc-per-node") + 1] = "1"
    settings = {"build": str(build), "steps": STEPS, "device": "cpu", "dp": 1}
    for name in ("alone", "both"):
        values = settings | {"figures": str(tmp_path / f"{name}.jsonl")}
        lines = [f"{key} = {json.dumps(value)}\n" for key, value in values.items()]
        (tmp_path / f"{name}.toml").write_text("".join(lines))
    words[words.index("run.toml")] = str(tmp_path / "both.toml")
    agents = [
        agent
        for number in range(2)
        for agent in start(1, tmp_path / f"agent{number}", "torch.distributed.run", *words[1:])
    ]
    try:
        for agent in agents:
            agent.join(DEADLINE_S)
        assert [agent.exitcode for agent in agents] == [0, 0]
    finally:
        for agent in agents:
            agent.kill()
    result = launch(2, tmp_path / "alone", "engine", "train", tmp_path / "alone.toml")
    assert result.returncode == 0, result.stderr
    alone, both = (
        [json.loads(line)["loss"] for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        for name in ("alone", "both")
    )
    assert both == alone
    assert len(both) == STEPS


def test_the_script_for_slurm_is_what_a_shell_reads(tmp_path):
    (tmp_path / "train.sbatch").write_text(SLURM)
    subprocess.run(["/bin/bash", "-n", tmp_path / "train.sbatch"], check=True)
