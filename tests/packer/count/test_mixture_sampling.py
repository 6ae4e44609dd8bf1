"""How often samples of a mixture go in, and what their copies are called."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from isobatch.common.errors import DataError
from isobatch.packer.count.mixture_sampling import (
    copies_per_sample,
    copy_rows,
    left_out,
    part_numbers,
)
from isobatch.packer.sources.dataset import Dataset
from isobatch.packer.sources.detect import Located, Part


def mixture(*parts, num_samples=None):
    """A dataset of parts given as dicts of weight, repeat."""
    located = Located("annotations", "", ("a.json",))
    made = [
        Part(name=f"p{n}", located=located, data_root="", **part) for n, part in enumerate(parts)
    ]
    return Dataset(name="mix", parts=tuple(made), num_samples=num_samples)


def part_of(sizes):
    return np.repeat(np.arange(len(sizes)), sizes)


def totals(dataset, sizes, seed=0):
    """Copies of all samples of each part."""
    copies = copies_per_sample(dataset, part_of(sizes), seed)
    return np.bincount(part_of(sizes), weights=copies, minlength=len(sizes)).astype(int).tolist()


@given(
    st.lists(st.tuples(st.integers(0, 50), st.floats(0.05, 4)), min_size=1, max_size=4),
    st.integers(0, 9),
)
def test_a_repeat_is_kept_by_each_sample_to_one_copy_and_by_the_part_exactly(parts, seed):
    sizes = [size for size, _ in parts]
    dataset = mixture(*({"repeat": repeat} for _, repeat in parts))
    copies = copies_per_sample(dataset, part_of(sizes), seed)
    for number, (size, repeat) in enumerate(parts):
        own = copies[part_of(sizes) == number]
        assert own.sum() == round(size * repeat)
        assert size == 0 or own.max() - own.min() <= 1


@given(st.lists(st.tuples(st.integers(1, 60), st.integers(1, 9)), min_size=1, max_size=4))
def test_weights_give_their_shares_without_repeating_anything(parts):
    sizes, weights = zip(*parts, strict=True)
    found = totals(mixture(*({"weight": float(weight)} for weight in weights)), sizes)
    largest = min(
        size / weight for size, weight in parts
    )  # samples per unit of weight that every part can give
    assert all(
        abs(number - largest * weight) <= 0.5 + 1e-9
        for number, weight in zip(found, weights, strict=True)
    )
    assert all(number <= size for number, size in zip(found, sizes, strict=True))
    assert any(number == size for number, size in zip(found, sizes, strict=True))


@given(
    st.lists(st.tuples(st.integers(1, 60), st.integers(1, 9)), min_size=1, max_size=4),
    st.integers(1, 500),
)
def test_num_samples_is_the_total_to_rounding(parts, num_samples):
    sizes, weights = zip(*parts, strict=True)
    dataset = mixture(*({"weight": float(weight)} for weight in weights), num_samples=num_samples)
    found = totals(dataset, sizes)
    assert abs(sum(found) - num_samples) <= len(parts) / 2
    for number, weight in zip(found, weights, strict=True):
        assert abs(number - num_samples * weight / sum(weights)) <= 0.5


def test_the_shares_of_pipetune_are_kept():
    dataset = mixture(*({"weight": weight} for weight in (5.0, 5.0, 90.0)))
    assert totals(dataset, [400, 200, 900]) == [50, 50, 900]


def test_what_is_drawn_depends_on_the_seed_alone():
    dataset = mixture({"repeat": 0.5}, {"repeat": 0.5})
    first, again, other = (
        copies_per_sample(dataset, part_of([40, 40]), seed).tolist() for seed in (1, 1, 2)
    )
    assert first == again != other
    assert first[:40] != first[40:]  # parts are drawn apart


def test_a_weighted_part_without_usable_samples_is_an_error():
    with pytest.raises(DataError, match="p1 has no usable sample"):
        totals(mixture({"weight": 1.0}, {"weight": 1.0}), [5, 0])


def test_what_is_left_out_is_listed_with_its_part():
    dataset = mixture({"weight": 3.0}, {"weight": 1.0})
    copies = copies_per_sample(dataset, part_of([3, 3]), 0)
    rows = left_out(dataset, part_of([3, 3]), copies)
    assert [row for row, _, _ in rows] == np.flatnonzero(copies == 0).tolist()
    assert len(rows) == 2
    assert all(reason == "not_drawn" and "p1" in detail for _, reason, detail in rows)


def table(ids):
    return pa.table({"sample_id": pa.array(ids, pa.string()), "row": list(range(len(ids)))})


def test_copies_are_numbered_and_keep_their_row():
    copied = copy_rows(table(["a", "b", "c"]), np.array([3, 0, 1])).to_pydict()
    assert copied == {"sample_id": ["a", "a#2", "a#3", "c"], "row": [0, 0, 0, 2]}


def test_another_samples_own_id_is_not_taken():
    ids = (
        copy_rows(table(["a", "a#2", "a", "a#2"]), np.ones(4, int)).column("sample_id").to_pylist()
    )
    assert ids == ["a", "a#2", "a#3", "a#2#2"]


@given(
    st.lists(
        st.tuples(st.sampled_from(["a", "b", "a#2", "a#2#2", "\u00e4"]), st.integers(0, 3)),
        max_size=12,
    )
)
def test_ids_are_all_different_and_the_first_keeps_its_own(samples):
    ids, copies = [name for name, _ in samples], np.array([number for _, number in samples], int)
    copied = copy_rows(table(ids), copies).to_pydict()
    assert copied["row"] == np.repeat(np.arange(len(ids)), copies).tolist()
    assert len(set(copied["sample_id"])) == len(copied["sample_id"])
    seen = set()
    for name, row in zip(copied["sample_id"], copied["row"], strict=True):
        assert name == ids[row] if ids[row] not in seen else name.startswith(f"{ids[row]}#")
        seen.add(ids[row])


def test_positions_belong_to_the_part_that_they_lie_in():
    assert part_numbers(np.array([0, 1, 2, 3, 4]), [2, 0, 3]).tolist() == [0, 0, 2, 2, 2]


def test_no_samples_are_no_copies():
    assert copies_per_sample(mixture({}), np.empty(0, int), 0).tolist() == []
    assert len(copy_rows(table([]), np.empty(0, int))) == 0
