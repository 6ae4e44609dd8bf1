"""A run with LoRA resumes on what it was trained on; anything else is refused in one line."""

import pytest
import torch

pytest.importorskip("peft")

from isobatch.engine.train.models.lora import add_adapters, basis_of
from isobatch.engine.train.models.tiny_vlm import make_tiny_vlm
from isobatch.engine.train.options import LoraOptions
from isobatch.models.presets import load_model
from support.builds.sample_tables import write_tabled
from support.builds.shard_fixture import group_samples, make_samples
from support.trainers.engine_train import main

torch.set_num_threads(1)
LORA = ["--lora-rank=2", "--lora-parts=vision", "--lora-parts=llm"]
ALL = {"lora_rank": 2, "lora_parts": ("vision", "projector", "llm")}


@pytest.fixture(scope="module")
def build(tmp_path_factory):
    folder = tmp_path_factory.mktemp("packed") / "build"
    return write_tabled(folder, group_samples(make_samples(60)))


@pytest.fixture(scope="module")
def saved(build, tmp_path_factory):
    """The folder of a state after a step."""
    state = tmp_path_factory.mktemp("run") / "state"
    assert train(build, state, *LORA) == 0
    return state


def train(build, state, *options, steps=1):
    try:
        call = [str(build), "--plan=auto", f"--steps={steps}", "--device=cpu", f"--state={state}"]
        return main([*call, *options])
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([*LORA, "--lora-alpha=32"], "with --lora-alpha 16.0, this run has 32.0"),
        ([*LORA[:2]], "with --lora-parts ['llm', 'vision'], this run has ['vision']"),
        ([*LORA, "--lora-targets=qkv"], "with --lora-targets ['all-linear'], this run has ['qkv']"),
        ([*LORA, "--seed=1"], "with a base model whose hash is "),
        ([], "give the same model"),
    ],
)
def test_another_alpha_part_target_or_base_is_refused_in_one_line(
    build, saved, options, message, capsys
):
    capsys.readouterr()
    assert train(build, saved, *options, steps=2) == 2
    error = capsys.readouterr().err
    assert message in error
    assert f"{saved}/step-1" in error
    assert len(error.splitlines()) == 1


def test_the_same_run_resumes_in_any_precision(build, saved, capsys):
    assert train(build, saved, *LORA, "--precision=bf16", steps=2) == 0
    assert "resumes after step 0" in capsys.readouterr().out


def test_a_state_without_adapters_is_refused(build, tmp_path, capsys):
    assert train(build, tmp_path) == 0
    capsys.readouterr()
    assert train(build, tmp_path, *LORA, steps=2) == 2
    error = capsys.readouterr().err
    assert "does not say what its adapters were trained on, or has none" in error
    assert len(error.splitlines()) == 1


def adapted(seed=0, change=None):
    torch.manual_seed(seed)
    layers = dict(enumerate(make_tiny_vlm(load_model("tiny"), 100, 1).layers))
    if change is not None:
        change(layers)
    parts = ["vision"] * 3 + ["projector"] + ["llm"] * (len(layers) - 4)
    add_adapters(layers, parts, LoraOptions(**ALL), 0)
    return layers


def test_the_base_is_what_all_frozen_weights_are_whatever_their_precision():
    expected = basis_of(adapted(), LoraOptions(**ALL))

    def negate(layers):  # of one weight, in the last layer
        with torch.no_grad():
            layers[len(layers) - 1].head.weight.neg_()

    trained = adapted()
    with torch.no_grad():
        for layer in trained.values():
            for name, weight in layer.named_parameters():
                weight.copy_(weight + 1 if ".lora_" in name else weight.bfloat16())
    assert basis_of(trained, LoraOptions(**ALL)) == expected
    assert basis_of(adapted(change=negate), LoraOptions(**ALL)) != expected
    assert basis_of(adapted(seed=1), LoraOptions(**ALL)) != expected
