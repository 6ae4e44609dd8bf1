"""`--dry-run` says what a plan says, and reads neither weights nor samples."""

import re

import pytest
import torch

import isobatch.engine.cli
from isobatch.engine.planning.plan import read_plan
from isobatch.engine.train.models._transformers_files import make_config
from isobatch.loaders import StreamingLoader
from support.builds.sample_tables import write_tabled
from support.builds.shard_fixture import group_samples, make_samples
from support.trainers.engine_train import main

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def build(tmp_path_factory):
    folder = tmp_path_factory.mktemp("packed") / "build"
    write_tabled(folder, group_samples(make_samples(60)))
    for shard in (folder / "shards").iterdir():
        shard.unlink()
    return folder


@pytest.fixture
def said(build, capsys):
    """Options -> what a dry run prints."""

    def run(*options):
        assert main([str(build), "--dry-run", *options]) == 0
        return capsys.readouterr().out

    return run


def test_without_a_plan_layers_are_cut_evenly_and_nothing_is_written(said, build, tmp_path):
    text = said("--dp=2", f"--state={tmp_path / 'states'}", f"--figures={tmp_path / 'figures'}")
    assert re.search(r"planned for h100, not measured: a step takes [0-9.,]+ ms", text)
    assert "GiB" in text
    assert list(tmp_path.iterdir()) == []
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_with_a_plan_the_time_is_that_of_the_plan(said, build, tmp_path, capsys, schedule):
    planned = ["plan", str(build), "--cluster=a100_80g", "--pp=2", "--micro-batches=4"]
    planned += [f"--schedule={schedule}", f"--out={tmp_path / 'plan'}"]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("sys.argv", ["engine", *planned])
        isobatch.engine.cli.main()
    capsys.readouterr()
    plan = read_plan(tmp_path / "plan" / "plan.json")
    text = said(f"--plan={tmp_path / 'plan' / 'plan.json'}")
    (milliseconds,) = re.findall(r"planned for a100_80g, .* takes ([0-9.,]+) ms", text)
    assert float(milliseconds.replace(",", "")) == pytest.approx(
        plan.predicted.step_ns / 1e6, abs=0.051
    )
    assert plan.training.mode.precision in text


def test_a_model_folder_needs_no_weights(said, build, tmp_path):
    make_config("internvl", StreamingLoader(build, dp_rank=0, dp_world_size=1)).save_pretrained(
        tmp_path
    )
    assert "planned for h100" in said("--model=internvl", f"--config={tmp_path}", "--lora-rank=2")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--dp=0"], "--dp"),
        (["--plan=no.json"], "no.json"),
        (["--lr=-1"], "--lr"),
        (["--zero-stage=2"], "zero_stage 0 or 1, not fp32 and 2"),
        (["--state={file}"], "this is a file; give a folder"),
        (["--export=out"], "--export writes models of transformers"),
        (["--eval=nothing"], "nothing"),
        (["--lora-rank=2", "--lora-targets=nonsense"], "--lora-targets nonsense"),
        (["--lora-rank=2", "--freeze=llm"], "--freeze"),
        (["--freeze=vision", "--lr-vision=1e-4"], "--lr-vision is a learning rate for a part that"),
        (["--lora-rank=2", "--lr-projector=1e-4"], "--lr-projector is a learning rate for a part"),
    ],
)
def test_wrong_options_are_the_same_line_as_without(build, options, message, capsys):
    told = [option.format(file=build / "manifest.json") for option in options]
    assert main([str(build), "--dry-run", *told]) in (1, 2)
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error
