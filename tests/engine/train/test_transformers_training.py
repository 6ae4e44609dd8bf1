"""`python -m engine train` of models of transformers: it trains, resumes with other stages,
gives weights back.
"""

import json

import pytest
import torch

from support.ranks import launch

pytest.importorskip("transformers")

import transformers

from support.builds.manuals_build import build_manuals
from support.trainers.engine_train import main

pytestmark = [
    pytest.mark.slow,
]

STEPS, SAVED_BEHIND = 4, 2
TOLERANCE = 1e-5
"""Of losses, relative: ranks add up in the same order, but gradients' norm, by which all are
clipped.
"""

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def build(tmp_path_factory):
    return build_manuals(tmp_path_factory.mktemp("packed"), "llava")


def arguments(build, **options):
    # each step's own mean, so that losses of two steps can be compared
    own = {"loss_normalizer": "step", "micro_batches_per_step": 2, "lr": 1e-3}
    given = {"device": "cpu", **own, **options}
    return [str(build), *(f"--{name.replace('_', '-')}={value}" for name, value in given.items())]


def on_two(build, folder, **options):
    """What is printed."""
    result = launch(2, folder, "engine", "train", *arguments(build, **options))
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout


def run_here(*given, **options):
    """In this process, as without torchrun; -> the exit status."""
    try:
        return main(arguments(*given, **options))
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def losses(path):
    """Of each step of a file of figures."""
    return {
        figures["step"]: figures["loss"]
        for figures in map(json.loads, path.read_text().splitlines())
    }


@pytest.fixture(scope="module")
def exported(build, tmp_path_factory):
    """What one process wrote when it had trained."""
    folder = tmp_path_factory.mktemp("alone") / "model"
    assert run_here(build, steps=STEPS, export=folder) == 0
    return folder


def test_two_ranks_saved_and_continued_by_others_give_losses_and_weights_of_one(
    build, exported, tmp_path, capsys
):
    assert run_here(build, steps=STEPS, figures=tmp_path / "alone") == 0
    output = capsys.readouterr().out
    assert (
        "stage 0: patch_embedding, vision_layer 0, vision_layer 1, vision_projector, "
        "token_embedding" in output
    )
    expected = losses(tmp_path / "alone")
    assert sorted(expected) == list(range(STEPS))
    assert expected[STEPS - 1] < expected[0]
    saving = {"state": tmp_path / "state", "recompute": "all"}
    on_two(
        build,
        tmp_path / "on two",
        steps=SAVED_BEHIND,
        figures=tmp_path / "first",
        borders="0,3,8",
        **saving,
    )
    then = on_two(
        build,
        tmp_path / "again",
        steps=STEPS,
        figures=tmp_path / "then",
        export=tmp_path / "model",
        **saving,
    )
    assert "stage 1: token_embedding, llm_layer 0, llm_layer 1, head" in then
    assert "1 x 2 ranks, 2 micro-batches each; resumes after step 1" in then
    assert sorted(losses(tmp_path / "then")) == [SAVED_BEHIND, SAVED_BEHIND + 1]
    assert losses(tmp_path / "first") | losses(tmp_path / "then") == pytest.approx(
        expected, rel=TOLERANCE
    )
    read = transformers.AutoModelForImageTextToText.from_pretrained
    alone, trained = (
        dict(read(folder).named_parameters()) for folder in (exported, tmp_path / "model")
    )
    for name, weight in alone.items():
        if not name.endswith(
            "k_proj.bias"
        ):  # attention is blind to it: its gradient is rounding, which Adam blows up
            off = (trained[name] - weight).detach().norm()
            assert float(off) <= 1e-3 * float(weight.detach().norm()), name


def test_a_folder_of_weights_is_trained_on(build, exported, tmp_path):
    assert run_here(build, steps=1, figures=tmp_path / "before") == 0
    assert run_here(build, steps=1, figures=tmp_path / "after", config=exported) == 0
    before, after = (losses(tmp_path / name)[0] for name in ("before", "after"))
    # trained weights, on what they were trained with
    assert after < before - 0.01


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"model": "qwen2_vl"},
            "the build is for llava_1_5, whose images are not cut for qwen2_vl",
        ),
        ({"config": "none"}, "none.json: "),
        ({"config": "other"}, "image token 7; the build "),
        ({"dp": 3}, "--dp is 3; 1 processes"),
        ({"borders": "0,9"}, "partition [0, 9] of 8 layers; borders must rise from 0 to 8"),
        ({"model": "tiny", "config": "other"}, "the model tiny has none"),
    ],
)
def test_what_does_not_fit_together_is_told_in_one_line(
    build, exported, tmp_path, capsys, options, message
):
    config = json.loads((exported / "config.json").read_text()) | {"image_token_id": 7}
    (tmp_path / "other.json").write_text(json.dumps(config))
    if "config" in options:
        options = options | {"config": tmp_path / f"{options['config']}.json"}
    assert run_here(build, steps=1, **options) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.strip().splitlines()) == 1
