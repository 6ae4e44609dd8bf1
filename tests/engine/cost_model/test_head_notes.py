"""Tensor-parallel splits of attention heads: what is noted, what is refused."""

import pytest

from isobatch.common.errors import ConfigError
from isobatch.engine.cost_model.parallel import head_notes
from isobatch.models.presets import load_model

INTERNVL, QWEN = load_model("internvl_1_5"), load_model("qwen2_vl")


def test_what_divides_all_heads_needs_no_note():
    assert head_notes(INTERNVL, 1) == []
    for tp in (1, 2, 4):
        assert head_notes(QWEN, tp) == []


def test_heads_of_an_encoder_that_are_not_divided_are_noted_as_they_are_planned():
    assert head_notes(INTERNVL, 2) == [
        "tp 2 does not divide the 25 heads of the vision encoder: planned with 13 on each GPU, for "
        "trainers that pad or split unevenly"
    ]


def test_copied_key_heads_are_noted():
    assert head_notes(INTERNVL, 16)[1:] == ["tp 16 holds each of the LLM's 8 key heads on 2 GPUs"]


@pytest.mark.parametrize(
    ("model", "tp"),
    [(INTERNVL, 32), (QWEN, 8), (QWEN, 7), (QWEN, 3)],  # of 48 / 8 and 28 / 4 heads
)
def test_a_split_of_the_llm_that_no_trainer_runs_is_refused(model, tp):
    with pytest.raises(ConfigError, match=rf"tp is {tp}, but the LLM of .* no trainer splits a he"):
        head_notes(model, tp)
