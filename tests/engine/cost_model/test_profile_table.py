"""Costs out of profiles: they give back what was measured, survive JSON, and refuse what lies too
far away.
"""

import json
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest

from isobatch.common.errors import ConfigError
from isobatch.engine.cost_model.analytical import layer_costs
from isobatch.engine.cost_model.costs import MEMORY
from isobatch.engine.cost_model.layer_list import phases_of
from isobatch.engine.cost_model.loads import Loads, PhaseLoads, labelled
from isobatch.engine.cost_model.parallel import Parallelism
from isobatch.engine.cost_model.profile_table import (
    COLUMNS,
    make_profile,
    misfit,
    nonnegative_least_squares,
    profile_from_dict,
    profile_to_dict,
    profiled_costs,
    read_profile,
    write_profile,
)
from isobatch.models.clusters import load_cluster
from isobatch.models.layer_bytes import LOSS_CHUNK
from isobatch.models.presets import load_model

A100, PARALLEL = load_cluster("a100_80g"), Parallelism(tp=2, pp=4, dp=4)
TOLERANCE = 0.06
"""Of a layer's forward and backward time, between what was measured; measured .021 to .053, the
most where a product changes from reading weights to computing.
"""
STEP_TOLERANCE = 0.015
"""Of all layers of a micro-batch together; measured .007 to .012."""


def loads_of(images, samples, clips):
    """Images of 1,025 tokens, samples and clips as lists of lengths, per micro-batch."""
    images = np.asarray(images)

    def phase(lists):
        arrays = [np.asarray(own, np.int64) for own in lists]
        return PhaseLoads(
            tokens=np.array([own.sum() for own in arrays]),
            squares=np.array([(own**2).sum() for own in arrays]),
            items=np.array([len(own) for own in arrays]),
        )

    vision = PhaseLoads(tokens=images * 1025, squares=images * 1025**2, items=images)
    llm = phase(samples)
    # from none to half of the tokens
    shares = np.arange(len(llm)) % 5 / 8
    labels = labelled((llm.tokens * shares).astype(np.int64))
    return Loads(vision=vision, audio=phase(clips), llm=llm, labels=labels)


def sweep():
    """What a runtime would measure: each phase from little to much, in long samples and in short
    ones.
    """
    tokens = [64, 128, 256, 512, 1024, 2048, 4096, 8192]
    samples = [own for size in tokens for own in ([size], [size // 8] * 8)]
    images = [1, 2, 3, 4, 6, 8, 10, 14] * 2
    return loads_of(
        images, samples, [[own] for own in (50, 100, 200, 400, 800, 1500, 1500, 1500)] * 2
    )


def random_loads(rng, count):
    samples = [rng.integers(64, 1024, rng.integers(1, 8)) for _ in range(count)]
    clips = [rng.integers(50, 1500, 1) for _ in range(count)]
    return loads_of(rng.integers(1, 15, count), samples, clips)


def measured(name):
    """(profile, what the analytical model says) of a model."""
    model = load_model(name)
    loads = sweep()
    return make_profile(layer_costs(model, A100, PARALLEL, loads), loads, phases_of(model)), model


@pytest.mark.parametrize(
    "name", ["internvl_1_5", "orchmllm_84b", "pipetune_3b", "eva_clip_1b_internlm2_20b"]
)
def test_a_profile_of_the_analytical_model_gives_its_costs_back(name):
    profile, model = measured(name)
    loads = random_loads(np.random.default_rng(3), 100)
    expected, made = layer_costs(model, A100, PARALLEL, loads), profiled_costs(profile, loads)
    for column in MEMORY:
        # sizes are linear in tokens, but for rounding and for the one chunk of the loss
        difference = np.abs(getattr(made, column) - getattr(expected, column))
        assert difference[:-1].max() <= 2
        assert difference[-1].max() <= (8 * LOSS_CHUNK if column.endswith("working_bytes") else 2)
    times, true_times = (each.forward_ns + each.backward_ns for each in (made, expected))
    # a layer of almost no weight, such as an embedding, is launches, not time
    matters = true_times > 1e-3 * true_times.sum(axis=0)
    assert np.abs(times / np.maximum(true_times, 1) - 1)[matters].max() < TOLERANCE
    assert np.abs(times.sum(axis=0) / true_times.sum(axis=0) - 1).max() < STEP_TOLERANCE
    assert (made.names, made.kinds) == (expected.names, expected.kinds)
    for column in ("state_bytes", "param_counts", "sends_grad"):
        assert (getattr(made, column) == getattr(expected, column)).all()
    assert misfit(profile) < TOLERANCE


def test_a_profile_survives_json_and_disk(tmp_path):
    profile, _ = measured("tiny")
    assert profile_to_dict(
        profile_from_dict(json.loads(json.dumps(profile_to_dict(profile))))
    ) == profile_to_dict(profile)
    write_profile(profile, tmp_path / "profile.json")
    again = profiled_costs(read_profile(tmp_path / "profile.json"), sweep())
    for column in COLUMNS:
        assert (getattr(again, column) == getattr(profiled_costs(profile, sweep()), column)).all()


def test_more_to_do_never_costs_less_however_noisy_the_measurements_are():
    profile, _ = measured("internvl_1_5")
    rng = np.random.default_rng(9)
    noisy = {
        name: np.rint(
            getattr(profile.costs, name) * rng.uniform(0.7, 1.3, profile.costs.forward_ns.shape)
        ).astype(int)
        for name in ("forward_ns", "input_grad_ns", "weight_grad_ns", "recompute_ns")
    }
    shaky = replace(profile, costs=replace(profile.costs, **noisy))
    less = random_loads(rng, 60)
    more = replace(
        less, llm=replace(less.llm, tokens=less.llm.tokens + 5, squares=less.llm.squares + 25)
    )
    small, large = profiled_costs(shaky, less), profiled_costs(shaky, more)
    assert (large.forward_ns >= small.forward_ns).all()
    assert (large.weight_grad_ns >= small.weight_grad_ns).all()
    assert misfit(shaky) > misfit(profile)


def test_a_phase_with_nothing_to_do_costs_nothing():
    profile, _ = measured("internvl_1_5")
    costs = profiled_costs(profile, loads_of([0], [[500]], [[100]]))
    vision = [
        place for place, kind in enumerate(costs.kinds) if kind.startswith(("patch", "vision"))
    ]
    assert not costs.forward_ns[vision].any()
    assert not costs.send_ns[vision].any()


@pytest.mark.parametrize(
    ("images", "samples", "message"),
    [
        (
            30,
            [100],
            r"a micro-batch has 30,750 vision tokens, the profile's largest 14,350: .* up to 1.25",
        ),
        (1, [11_000], r"11,000 llm tokens, the profile's largest 8,192"),
    ],
)
def test_what_lies_too_far_beyond_the_measurements_is_refused(images, samples, message):
    profile, _ = measured("internvl_1_5")
    with pytest.raises(ConfigError, match=message):
        profiled_costs(profile, loads_of([images], [samples], [[50]]))


def test_many_tokens_in_longer_samples_than_measured_are_refused_by_their_squares():
    model, short = load_model("internvl_1_5"), loads_of([1, 2], [[64] * 8, [64] * 64], [[50], [50]])
    profile = make_profile(layer_costs(model, A100, PARALLEL, short), short, phases_of(model))
    with pytest.raises(ConfigError, match=r"16,777,216 llm squares, the profile's largest 262,144"):
        profiled_costs(profile, loads_of([1], [[4096]], [[50]]))
    profiled_costs(profile, loads_of([1], [[4096]], [[50]]), farthest=100)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not a profile"),
        ("[]", "not a profile"),
        ('{"version": 1}', "version is 1; this release reads version 4"),
        ('{"version": 4}', "not a profile: KeyError: 'kinds'"),
        ('{"version": 4, "precision": "fp16"}', "precision is 'fp16'; use one of bf16, fp32"),
    ],
)
def test_a_file_that_is_no_profile_is_an_error_that_names_it(tmp_path, text, message):
    path = tmp_path / "profile.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=rf"profile\.json: {message}"):
        read_profile(path)


def test_a_profile_whose_parts_do_not_belong_together_is_an_error():
    profile, _ = measured("tiny")
    with pytest.raises(ConfigError, match="2 micro-batches, but measurements of 16"):
        replace(profile, loads=profile.loads.take(np.array([0, 1])))
    with pytest.raises(ConfigError, match=r"phases are \['text'"):
        replace(profile, phases=("text",) * len(profile.phases))
    with pytest.raises(ConfigError, match="do not fit"):
        replace(profile, layers=(0, 99))
    with pytest.raises(ConfigError, match="no phase is given for the layers head"):
        make_profile(
            profile.costs,
            profile.loads,
            {kind: "llm" for kind in profile.costs.kinds if kind != "head"},
        )


def test_nonnegative_least_squares_equal_the_best_subset():
    rng = np.random.default_rng(11)
    for _ in range(200):
        size = int(rng.integers(1, 6))
        rows, target = rng.normal(size=(12, size)), rng.normal(size=12)
        best = float(np.square(target).sum())
        for count in range(1, size + 1):
            for subset in combinations(range(size), count):
                found = np.linalg.lstsq(rows[:, subset], target, rcond=None)[0]
                if (found >= 0).all():
                    best = min(best, float(np.square(rows[:, subset] @ found - target).sum()))
        found = nonnegative_least_squares(rows, target)
        assert (found >= 0).all()
        assert float(np.square(rows @ found - target).sum()) == pytest.approx(best, abs=1e-9)
