"""A training run by one TOML file: its keys are the options, which override it."""

from math import inf
from pathlib import Path

import pytest

from isobatch.common.errors import ConfigError
from isobatch.engine.train.options import MeasureConfig, TrainConfig
from support.trainers.engine_train import main, parse


@pytest.fixture
def write(tmp_path):
    def file(text):
        path = tmp_path / "run.toml"
        path.write_text(text)
        return path

    return file


def test_keys_are_options_and_options_override_them(write):
    file = write(
        'build = "packed"\nlr = 1\nlr_schedule = "cosine"\nwarmup_steps = 0.1\nclip = inf\n'
        'freeze = ["vision", "projector"]\nstate = "state"\nlora_rank = 8\nmerge = true\n'
        'export = "model"\n'
    )
    config = parse([file, "--steps=7", "--lr=0.5", "--freeze=llm"])
    assert config == TrainConfig(
        build="packed",
        lr=0.5,
        lr_schedule="cosine",
        warmup_steps=0.1,
        clip=inf,
        freeze=("llm",),
        state=Path("state"),
        lora_rank=8,
        merge=True,
        export=Path("model"),
        steps=7,
    )
    assert isinstance(config.state, Path)
    # as by flags alone
    assert parse(["packed", "--lora-targets=q_proj", "--lora-targets=v_proj", "--lora-rank=2"]) == (
        TrainConfig(build="packed", lora_targets=("q_proj", "v_proj"), lora_rank=2)
    )
    out = parse([write('build = "packed"\nout = "measured"\n')], MeasureConfig).out
    assert out == Path("measured")


def test_a_folder_that_is_named_like_a_file_is_a_build(tmp_path):
    (tmp_path / "run.toml").mkdir()
    assert parse([tmp_path / "run.toml"]).build == str(tmp_path / "run.toml")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lr_shedule = 1", "run.toml: unknown key lr_shedule; known: beta1, "),
        ("lr_shedule = 1", "; did you mean lr_schedule?"),
        ("lr-schedule = 1", "; did you mean lr_schedule?"),
        ("steps = 1.5", "run.toml: steps is 1.5, but should be int"),
        ('freeze = "llm"', "run.toml: freeze is 'llm', but should be "),
        ("steps = 0", "steps is 0; it must be at least 1 ("),
        ('lr_schedule = "cosin"', "run.toml: lr_schedule is 'cosin', but should be one of "),
        ("clip = nan", "--clip nan: give a norm above 0"),
        ("weight_decay = nan", "weight_decay is nan; it must be at least 0"),
        ("beta2 = 1.0", "the betas of AdamW must be below 1"),
        ("warmup_steps = 3", "give constant_with_warmup, or another schedule ("),
        ('lr_schedule="cosine"\nwarmup_steps = 1.5', "give whole steps, or a share below 1"),
        ("eval_every = 3", "--eval-every needs --eval"),
        ("save_every = 3", "--save-every needs --state: the folder to save in"),
        ("effort = 3", "--effort is for --tune: give both, or neither"),
        (f"seed = {2**64}", f"seed is {2**64}; it must be in 0..18,446,744,073,709,551,615"),
        ("lora_alpha = 3.0", "--lora-alpha is for LoRA: give --lora-rank too"),
        ("merge = true\nlora_rank = 2", "--merge is for --export: give its folder"),
        ("steps = ", "run.toml: not valid TOML: "),
    ],
)
def test_what_is_wrong_is_one_line_with_file_and_key(write, text, message, capsys):
    file = write(f'build = "packed"\n{text}\n')
    assert main([file]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert str(file) in line


def test_a_file_without_a_build_and_none_at_all_are_said(write, capsys, tmp_path):
    assert main([write("steps = 3")]) == 2
    assert "run.toml: missing key build" in capsys.readouterr().err
    assert main([tmp_path / "none.toml"]) == 2
    assert "none.toml: No such file" in capsys.readouterr().err


def test_a_part_may_have_a_learning_rate_of_its_own():
    config = TrainConfig(build="packed", lr=1e-4, lr_vision=1e-5)
    assert [config.lr_of(part) for part in ("vision", "projector", "llm")] == [1e-5, 1e-4, 1e-4]
    with pytest.raises(ConfigError, match="--lr-llm -1: give a learning rate"):
        TrainConfig(build="packed", lr_llm=-1)
