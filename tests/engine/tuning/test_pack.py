"""What micro-batches of a step the tuner tries."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from isobatch.balance.baseline_samplers import pack_in_order
from isobatch.engine.tuning.pack import balanced_packings, lengths_to_try, marginal_costs
from support.cases import for_each
from support.costs.linear_costs import LinearModel, mixed_samples

lengths_st = st.lists(st.integers(0, 4096), min_size=1, max_size=60).map(
    lambda own: np.array(own, np.int64)
)


@given(lengths_st, st.integers(1, 5000))
def test_packing_in_order_keeps_the_order_and_the_cap(lengths, max_len):
    groups = pack_in_order(lengths, max_len)
    assert groups.samples.tolist() == list(range(len(lengths)))
    totals = groups.sum(lengths)
    assert ((totals <= max_len) | (groups.sizes == 1)).all()
    # no micro-batch could have taken the first sample of the next one
    firsts = lengths[groups.offsets[1:-1]]
    assert (totals[:-1] + firsts > max_len).all()


@given(lengths_st, st.sampled_from([512, 4096]), st.integers(1, 9000), st.integers(1, 8))
def test_sizes_hold_every_sample_and_none_is_tried_twice(lengths, max_seq_len, start, num_stages):
    tried = {
        sizes: lengths_to_try(
            lengths, max_seq_len=max_seq_len, sizes=sizes, first_len=start, num_stages=num_stages
        )
        for sizes in ("given", "multiples", "any")
    }
    first = max(start, int(lengths.max()), 1)
    assert tried["given"] == [first]
    for max_lens in tried.values():
        assert max_lens[0] == first
        assert min(max_lens) >= lengths.max()
        assert len(set(max_lens)) == len(max_lens)
    total = max(1, int(lengths.sum()))
    counts = {
        sizes: {-(-total // max_len) for max_len in max_lens} for sizes, max_lens in tried.items()
    }
    assert counts["given"] <= counts["multiples"] <= counts["any"]
    multiples = range(max_seq_len, total + max_seq_len, max_seq_len)
    assert counts["multiples"] >= {
        -(-total // max_len) for max_len in multiples if max_len >= lengths.max()
    }


def test_marginal_costs_of_a_linear_model_are_its_coefficients():
    model = LinearModel(encoders=3, layers=5)
    samples = mixed_samples(np.random.default_rng(0), 40)
    costs = marginal_costs(model, samples, np.zeros(8, bool), 8)
    # forward, and both gradients of what is trained
    llm = 15 * (model.token_ns * samples.llm.tokens + model.square_ns * samples.llm.squares)
    np.testing.assert_allclose(costs["llm"], llm, rtol=1e-6)
    np.testing.assert_allclose(
        costs["vision"], 3 * model.vit_token_ns * samples.vision.tokens, rtol=1e-6
    )
    assert not costs["audio"].any()
    again = marginal_costs(model, samples, np.arange(8) >= 3, 8)
    np.testing.assert_allclose(again["llm"], llm * 4 / 3, rtol=1e-6)


@for_each("seed", range(5))
def test_each_size_is_packed_evenly_by_the_llm_and_by_everything(seed):
    samples = mixed_samples(np.random.default_rng(seed), 128, longest=4096)
    costs = marginal_costs(LinearModel(vit_token_ns=9_000), samples, np.zeros(10, bool), 20)
    by_llm, by_all = balanced_packings(samples.llm.tokens, costs, 8192)
    both = costs["llm"] + costs["vision"]

    def uneven(groups, weights):
        totals = np.array([weights[groups[group]].sum() for group in range(len(groups))])
        return totals.max() / totals.mean()

    assert uneven(by_llm, costs["llm"]) < 1.03
    assert uneven(by_all, both) < min(1.03, uneven(by_llm, both))
