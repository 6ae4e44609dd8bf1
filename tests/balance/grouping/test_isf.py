from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isobatch.balance.grouping.isf import group_isf
from isobatch.balance.grouping.resources import Resource
from isobatch.common.types import Limits
from support.corpora import lengths
from support.oracles.isf_oracle import isf_oracle


def as_lists(groups):
    return [groups[g].tolist() for g in range(len(groups))]


@st.composite
def problems(draw):
    max_vision, max_seq_len = draw(st.integers(0, 12)), draw(st.integers(1, 60))
    samples = draw(
        st.lists(
            st.tuples(st.integers(0, max_vision), st.integers(0, max_seq_len)), max_size=80
        ).map(lambda rows: np.array(rows, dtype=np.int64).reshape(-1, 2))
    )
    limits = Limits(
        max_seq_len=max_seq_len,
        max_vision=max_vision,
        min_seq_len=draw(st.integers(0, max_seq_len)),
        min_vision=draw(st.integers(0, max_vision + 1)),
    )
    return samples[:, 0], samples[:, 1], limits


@settings(max_examples=150, deadline=None)
@given(problems(), st.integers(0, 2**32), st.integers(1, 6))
def test_equals_the_plain_oracle_and_loses_nothing(problem, seed, iterations):
    vision, tokens, limits = problem
    groups = group_isf(vision, tokens, limits, seed=seed, iterations=iterations)
    assert as_lists(groups) == isf_oracle(vision, tokens, limits, seed=seed, iterations=iterations)
    assert sorted(groups.samples.tolist()) == list(range(len(tokens)))
    assert (groups.sizes > 0).all()
    assert (groups.sum(vision) <= limits.max_vision).all()
    assert (groups.sum(tokens) <= limits.max_seq_len).all()


@settings(max_examples=50, deadline=None)
@given(problems(), st.integers(0, 1000))
def test_a_further_resource_counts_like_the_first_two(problem, seed):
    vision, tokens, limits = problem
    audio = Resource(
        name="audio tokens", load=vision, cap=limits.max_vision, target=limits.min_vision
    )
    no_vision = replace(limits, max_vision=0, min_vision=1)
    groups = group_isf(np.zeros_like(vision), tokens, no_vision, seed=seed, also=[audio])
    assert as_lists(groups) == as_lists(group_isf(vision, tokens, limits, seed=seed))


@settings(max_examples=50, deadline=None)
@given(problems(), st.integers(0, 1000))
def test_more_iterations_never_need_more_groups(problem, seed):
    vision, tokens, limits = problem
    numbers = [
        len(group_isf(vision, tokens, limits, seed=seed, iterations=n)) for n in (1, 2, 4, 8)
    ]
    assert numbers == sorted(numbers, reverse=True)


def test_seeds_and_iterations_shuffle_differently():
    tokens = np.random.default_rng(1).integers(1, 100, 500)
    limits = Limits(max_seq_len=300, max_vision=0, min_seq_len=290, min_vision=1)
    first, second = (
        group_isf(np.zeros(500, dtype=np.int64), tokens, limits, seed=s) for s in (0, 1)
    )
    assert as_lists(first) != as_lists(second)


def test_a_sample_over_a_cap_is_an_error_that_names_it():
    limits = Limits(max_seq_len=10, max_vision=2, min_seq_len=9, min_vision=2)
    with pytest.raises(ValueError, match=r"cap of 2 image patches \(first: sample 1 with 3\)"):
        group_isf(np.array([1, 3]), np.array([5, 5]), limits, seed=0)


@pytest.mark.parametrize("max_vision", [9, 12, 15])
def test_equals_the_oracle_on_the_published_lengths_group_for_group(max_vision):
    vision, tokens = lengths()["vit_num"], lengths()["token_num"]
    assert len(tokens) == 30_730
    limits = Limits(
        max_seq_len=4096, max_vision=max_vision, min_seq_len=4096 - 128, min_vision=max_vision
    )
    groups = group_isf(vision, tokens, limits, seed=0)
    assert as_lists(groups) == isf_oracle(vision, tokens, limits, seed=0, iterations=10)
    assert len(np.unique(groups.samples)) == 30_730
