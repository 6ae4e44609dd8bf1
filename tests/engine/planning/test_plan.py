"""Plan files: read back as they were written, and refused in one line if they are not ours."""

import hashlib
import json
from dataclasses import replace

import numpy as np
import pytest

from isobatch.common.errors import ConfigError, DataError
from isobatch.engine.cost_model.training_mode import TrainingMode
from isobatch.engine.planning import planner
from isobatch.engine.planning.plan import plan_from_json, read_plan, write_plan
from support import ROOT
from support.cases import for_each
from support.costs.plan_questions import plan_request, uneven_loads


@pytest.fixture(scope="module")
def plan():
    return planner.plan(plan_request()).plan


def test_a_plan_survives_its_file(plan, tmp_path):
    write_plan(plan, tmp_path / "plan.json")
    read = read_plan(tmp_path / "plan.json")
    assert read.to_json() == plan.to_json()
    assert read.predicted == plan.predicted
    assert (read.model, read.cluster, read.parallel, read.training) == (
        plan.model,
        plan.cluster,
        plan.parallel,
        plan.training,
    )
    np.testing.assert_array_equal(read.loads.llm.squares, plan.loads.llm.squares)
    np.testing.assert_array_equal(read.recompute_mask, plan.recompute_mask)
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


def test_a_plan_of_version_1_is_read_with_the_mode_that_it_assumed():
    plan = read_plan(ROOT / "tests" / "data" / "plan_version_1.json")
    assert plan.training.mode == TrainingMode(precision="bf16", gradients="fp32", zero_stage=1)
    assert (plan.parallel.pp, plan.parallel.dp, plan.training.llm) == (2, 2, True)
    again = planner.plan(plan.changed()).plan
    # then, what a patch embedding keeps was counted too low, and a logit cost 6 bytes: now 2, and 8
    # of a chunk, which has all logits of a tiny model; messages on their way are counted now
    logits = int(plan.loads.llm.tokens.max()) * plan.model.dimensions[1].vocab_size
    found = {name: getattr(again.predicted, name) for name in ("peak_bytes", "full_peak_bytes")}
    assert again.predicted == replace(plan.predicted, **found)
    for name, (first, last) in found.items():
        before = getattr(plan.predicted, name)
        assert first == pytest.approx(before[0], rel=0.01)
        assert last == pytest.approx(before[1] + 4 * logits, rel=0.01)
    assert plan_from_json(plan.to_json(), where="here").to_json() == plan.to_json()


def test_a_plan_of_version_2_is_read_as_one_of_all_logits(plan):
    old = json.loads(json.dumps(plan.to_json()))
    for loads in (old["inputs"]["full"], old["inputs"]["loads"]):
        del loads["labels"]
    text = json.dumps(old["inputs"], sort_keys=True).encode()
    del old["deferred"]
    old |= {"version": 2, "inputs_hash": hashlib.sha256(text).hexdigest()}
    read = plan_from_json(old, where="here")
    np.testing.assert_array_equal(read.loads.labels.tokens, read.loads.llm.tokens)
    assert read.predicted == plan.predicted


def test_the_hash_is_that_of_the_question(plan):
    assert planner.plan(plan_request()).plan.inputs_hash == plan.inputs_hash
    others = [
        plan_request(memory_bytes=plan.memory_bytes + 1),
        plan_request(loads=uneven_loads(32, 7, model="internvl_1_5")),
    ]
    assert len({plan.inputs_hash, *(planner.plan(other).plan.inputs_hash for other in others)}) == 3


def changed(plan, *path, value):
    values = json.loads(json.dumps(plan.to_json()))
    table = values
    for name in path[:-1]:
        table = table[name]
    table[path[-1]] = value
    return values


def with_own_hash(values):
    """As a planner with other inputs would have written it."""
    text = json.dumps(values["inputs"], sort_keys=True)
    return {**values, "inputs_hash": hashlib.sha256(text.encode()).hexdigest()}


@for_each(
    ("path", "value", "message"),
    [
        (("version",), 5, "here: plan version 5; this isobatch reads version 4: plan again"),
        (("inputs", "training", "mode"), {}, "here, mode: has"),
        (("inputs", "training", "mode", "speed"), 1, "here, mode: has .*'speed'"),
        (("inputs", "training", "mode"), 1, "here, mode: has int"),
        (("speed",), 1, "here: has .*'speed'.*; it must have"),
        (("inputs", "speed"), 1, "here, inputs: has .*'speed'.*; it must have"),
        (("inputs", "cluster", "speed"), 1, "here, cluster: unknown key speed; known: "),
        (("inputs", "schedule"), "2f2b", "schedule is '2f2b'; use one of"),
        (("inputs", "loads", "llm", "tokens"), [1.5], "loads are not lists of integers"),
        (("inputs", "loads", "sound"), {}, "here, loads: has .*'sound'"),
        (("inputs",), 1, "here, inputs: has int; it must have"),
        (
            ("inputs", "num_micro_batches"),
            0,
            "loads of 32 micro-batches and 1 of the largest; give steps of 1, and 1",
        ),
        (
            ("deferred",),
            [1, 1, 1, 1],
            "deferred is .1, 1, 1, 1.; on 4 ranks 1f1b holds back at most",
        ),
        (("predicted",), None, "here, predicted: has NoneType; it must have"),
        (("predicted", "peak_bytes"), [], "predicted peak_bytes has 0 entries; there must be 4"),
        (
            ("predicted", "forward_ns"),
            [1] * 5,
            "predicted forward_ns has 5 entries; there must be 4",
        ),
        (("borders",), [0, 5, 4, 20, 97], "borders must rise from 0 to 97"),
        (("borders",), [0, 97], "1 stages; 4 ranks with 1 each make 4"),
        (("borders",), [0, 1, 2, 3.5, 97], "borders is"),
        (("recompute",), [97], r"recompute names layers \[97\]; there are 97"),
        (("predicted", "step_ns"), "fast", "here, predicted: step_ns is 'fast', but should be int"),
    ],
)
def test_what_is_not_a_plan_is_refused(plan, path, value, message):
    with pytest.raises(ConfigError, match=message) as error:
        plan_from_json(with_own_hash(changed(plan, *path, value=value)), where="here")
    assert "\n" not in str(error.value)


@for_each("value", [None, "x", -1, [], {}, [1], 10**25, 1.5, True])
@for_each(
    "path",
    [
        (),
        ("model",),
        ("model", "vision"),
        ("model", "vit"),
        ("cluster",),
        ("parallel",),
        ("parallel", "tp"),
        ("training",),
        ("num_micro_batches",),
        ("full", "llm", "tokens"),
        ("loads", "vision", "tokens", 0),
    ],
)
def test_whatever_is_edited_into_the_inputs_is_refused_in_one_line(plan, path, value):
    with pytest.raises(
        ConfigError, match="here: its inputs are not those that its predictions"
    ) as error:
        plan_from_json(changed(plan, "inputs", *path, value=value), where="here")
    assert "\n" not in str(error.value)


def test_missing_parts_are_named(plan):
    values = plan.to_json()
    del values["inputs"]["model"]
    with pytest.raises(ConfigError, match=r"here, inputs: has .*; it must have .*'model'"):
        plan_from_json(with_own_hash(values), where="here")
    with pytest.raises(ConfigError, match="here: plan version None"):
        plan_from_json([], where="here")


def test_files_that_cannot_be_read_are_named(tmp_path):
    with pytest.raises(
        DataError, match=r"nothing.json: No such file or directory; give the plan.json"
    ):
        read_plan(tmp_path / "nothing.json")
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(DataError, match=r"bad.json: not valid JSON"):
        read_plan(tmp_path / "bad.json")
