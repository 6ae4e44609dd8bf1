"""`python -m engine train` when something goes wrong while it runs: one line, and status 1; wrong
options, status 2.
"""

import json
import time

import pytest
import torch

import isobatch.engine.cli
from isobatch.engine.cost_model.training_mode import TrainingMode
from isobatch.engine.train.options import TrainConfig
from support.builds.audio_build import build_heard
from support.builds.sample_tables import write_tabled
from support.builds.shard_fixture import group_samples, make_samples
from support.cases import for_each
from support.rank_programs.tuned_ranks import stated_profile
from support.ranks import launch, start
from support.trainers.engine_train import main

DEADLINE_S = 60

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def build(tmp_path_factory):
    return write_tabled(
        tmp_path_factory.mktemp("packed") / "build", group_samples(make_samples(60))
    )


@pytest.fixture(scope="module")
def profile(tmp_path_factory):
    """Beside `less.json`, of a model whose first layer was frozen, and `half.json` in bf16."""
    path = tmp_path_factory.mktemp("profile") / "profile.json"
    stated_profile(path)
    values = json.loads(path.read_text())
    (path.parent / "half.json").write_text(json.dumps({**values, "precision": "bf16"}))
    values["kinds"][0]["sends_grad"] = False
    (path.parent / "less.json").write_text(json.dumps(values))
    return path


def part():
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.fixture
def alone():
    yield
    part()


@pytest.mark.parametrize("what", ["figures", "trace"])
def test_a_full_disk_is_told_in_one_line(build, what, capsys, alone):
    assert (
        main([str(build), "--plan=auto", "--steps=2", "--device=cpu", f"--{what}=/dev/full"]) == 1
    )
    assert capsys.readouterr().err == "error: /dev/full: No space left on device\n"


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
        (
            ["--tune", "--profile={profile}", "--encode=own"],
            "the first layer (patch_embedding) is trained",
        ),
        (["--tune", "--profile={profile}", "--effort=-1"], "effort -1"),
        (["--tune", "--profile={half}"], "half.json was measured in bf16, the run is in fp32"),
        (["--dp=0"], "--dp is 0"),
        (["--recompute=plan"], "--recompute plan needs a plan"),
        (["--recompute=adapt"], "so does --recompute adapt"),
        (["--recompute=adapt", "--profile={profile}"], "on a CPU needs --memory-gib"),
        (["--recompute=adapt", "--tune", "--profile={profile}"], "use --tune with --memory-gib"),
        (
            ["--recompute=adapt", "--profile={profile}", "--stages-per-rank=2"],
            "use --stages-per-rank 1",
        ),
        (
            ["--recompute=adapt", "--profile={less}", "--memory-gib=1"],
            "measure with these parts trained",
        ),
        (["--memory-gib=1"], "--memory-gib is for --recompute adapt and --tune"),
        (["--reserve-gib=1"], "--reserve-gib is for --recompute adapt"),
        (["--export=trained"], "--export writes models of transformers"),
        (["--export={profile}"], "this is a file; give a folder"),
        (["--state={profile}/deep"], "profile.json is a file; give a folder"),
        (["--figures={profile}/figures"], "profile.json is a file; give a folder"),
        (["--trace=."], "--trace .: this is a folder; give a file"),
        (["--config=config.json"], "the model tiny has none"),
        (["--model=qwen2_vl"], "the build is for tiny, whose images are not cut for qwen2_vl"),
    ],
)
def test_options_that_do_not_go_together_are_told_in_one_line(
    build, profile, options, message, capsys, alone
):
    named = [
        option.format(
            profile=profile,
            less=profile.parent / "less.json",
            half=profile.parent / "half.json",
        )
        for option in options
    ]
    assert main([str(build), "--plan=auto", "--device=cpu", *named]) == 2
    said = capsys.readouterr()
    assert message in said.err
    assert len(said.err.splitlines()) == 1
    assert not said.out


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_gpu_that_is_not_there_is_told_in_one_line(build, capsys, alone):
    assert main([str(build), "--device=cuda"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "--device cuda: torch finds no GPU here" in line


@for_each(
    ("option", "message"),
    [
        ("--save-every=0", "'--save-every': Input should be greater than or equal to 1"),
        ("--steps=-3", "'--steps': Input should be greater than or equal to 1"),
        ("--micro-batches-per-step=few", "'--micro-batches-per-step': "),
        ("--stages-per-rank=0", "'--stages-per-rank': Input should be greater than or equal to 1"),
        ("--memory-gib=nan", "--memory-gib nan is not a size in GiB"),
        ("--reserve-gib=-1", "--reserve-gib -1.0 is not a size in GiB"),
        ("--freeze=audio", "--freeze 'audio': give one of vision, projector, llm"),
        ("--borders=0;9", "--borders 0;9: give numbers"),
        ("--lr=1e39", "--lr 1e+39: give a learning rate from 0 to 1e+37"),
        ("--lr=-1", "--lr -1.0: give a learning rate"),
        ("--lr=nan", "--lr nan: give a learning rate"),
        ("--clip=nan", "--clip nan: give a norm above 0"),
        ("--clip=-1", "--clip -1.0: give a norm above 0"),
    ],
)
def test_numbers_that_make_no_sense_are_refused_with_their_option(option, message, capsys):
    assert main(["build", option]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_the_help_says_what_is_assumed_without_a_plan_and_for_one(capsys, monkeypatch):
    assert main(["--help"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "without a plan float32 weights and gradients, and nothing shared out" in said
    assert "SIGTERM saves and ends" in said
    mode = TrainConfig(build="build").training_mode()
    assert (mode.precision, mode.gradients, mode.zero_stage) == ("fp32", "fp32", 0)
    monkeypatch.setattr("sys.argv", ["engine", "plan", "--help"])
    isobatch.engine.cli.main()
    said = " ".join(capsys.readouterr().out.split())
    assert "AdamW with float32 moments; float32 gradients" in said
    assert "optimizer state shared out over replicas" in said
    planned = TrainingMode()
    assert (planned.precision, planned.gradients, planned.zero_stage) == ("bf16", "fp32", 1)


def test_an_output_that_cannot_be_written_ends_all_ranks_before_the_work(build, tmp_path):
    (tmp_path / "file").touch()
    wrong = f"--state={tmp_path / 'file'}"
    options = [build, "--device=cpu", "--steps=100000", wrong]
    result = launch(2, tmp_path / "printed", "engine", "train", *options, most_s=DEADLINE_S)
    assert result.returncode == 2
    (line,) = (line for line in result.stderr.splitlines() if "error: " in line)
    assert "this is a file; give a folder" in line
    assert not result.stdout


def test_folders_of_figures_and_trace_are_made(build, tmp_path, alone):
    figures, trace = tmp_path / "a" / "figures", tmp_path / "b" / "c" / "trace"
    assert main([str(build), "--device=cpu", "--steps=1", f"--{figures=!s}", f"--{trace=!s}"]) == 0
    assert figures.exists()
    assert trace.exists()


def test_a_build_with_sound_is_refused_in_one_line(tmp_path, capsys, alone):
    assert main([str(build_heard(tmp_path)), "--device=cpu"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "the build is for tiny_audio, which has an audio encoder" in line


def test_what_was_saved_is_told_where_something_was(build, tmp_path, capsys, alone):
    given = [str(build), "--device=cpu", "--steps=2", f"--state={tmp_path / 'state'}"]
    assert main(given) == 0
    assert "saved after step 1" in capsys.readouterr().out
    part()
    assert main(given) == 0  # there is nothing left to do
    said = capsys.readouterr().out
    assert "resumes after step 1" in said
    assert "saved" not in said


def test_memory_that_is_given_binds_the_tuner(build, profile, tmp_path, capsys):
    values = json.loads(profile.read_text())
    for kind in values["kinds"]:
        kind["state_bytes"] = 1 << 20
    (tmp_path / "heavy.json").write_text(json.dumps(values))
    given = [
        str(build),
        "--device=cpu",
        "--steps=1",
        "--tune",
        f"--profile={tmp_path / 'heavy.json'}",
    ]
    for size, status in (("1", 0), ("0.001", 2)):
        assert main([*given, f"--memory-gib={size}"]) == status
        part()
    (line,) = capsys.readouterr().err.splitlines()
    assert "no micro-batches of this step fit" in line
    assert "memory_bytes is 1,073,741;" in line


def test_a_rank_that_is_lost_ends_the_other_with_one_line(build, tmp_path):
    figures = tmp_path / "figures.jsonl"
    options = ["--plan=auto", "--steps=100000", "--device=cpu", f"--figures={figures}"]
    first, second = start(2, tmp_path, "engine", "train", build, *options)
    try:
        deadline = time.monotonic() + DEADLINE_S
        while not figures.exists() or len(figures.read_text().splitlines()) < 2:
            assert first.is_alive(), "the run ended by itself"
            assert time.monotonic() < deadline, "no step was trained in time"
            time.sleep(0.01)
        second.kill()
        first.join(DEADLINE_S)
        assert first.exitcode == 1
    finally:
        for process in (first, second):
            process.kill()
            process.join()
    (line,) = (tmp_path / "stderr").read_text().splitlines()
    assert "rank 0 stops: rank 1 does not answer any more" in line
