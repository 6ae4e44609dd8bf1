"""Plan files: read back as they were written, and refused in one line if they are not ours."""

import json

import numpy as np
import pytest
from plan_questions import question, uneven_loads

from balance.errors import ConfigError, DataError
from engine.plan import plan_from_json, read_plan, write_plan
from engine.planner import make_plan


@pytest.fixture(scope="module")
def plan():
    return make_plan(question()).plan


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


def test_the_hash_is_that_of_the_question(plan):
    assert make_plan(question(), search="bmp").plan.inputs_hash == plan.inputs_hash
    others = [question(memory_bytes=plan.memory_bytes + 1), question(loads=uneven_loads(32, 7, model="internvl_1_5"))]
    assert len({plan.inputs_hash, *(make_plan(other).plan.inputs_hash for other in others)}) == 3


def changed(plan, *path, value):
    values = json.loads(json.dumps(plan.to_json()))
    table = values
    for name in path[:-1]:
        table = table[name]
    table[path[-1]] = value
    return values


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("version",), 2, "here: plan version 2; this isobatch reads version 1: plan again"),
        (("speed",), 1, "here: has .*'speed'.*; it must have"),
        (("inputs", "speed"), 1, "here: unknown key speed; known: "),
        (("inputs", "cluster", "speed"), 1, "here, cluster: unknown key speed; known: "),
        (("inputs", "schedule"), "2f2b", "schedule is '2f2b'; use one of"),
        (("inputs", "parallel", "tp"), 8, "its inputs are not those that its predictions were made from: plan again"),
        (("inputs", "loads", "llm", "tokens"), [1.5], "loads are not lists of integers"),
        (("inputs", "loads", "sound"), {}, "here, loads: has .*'sound'"),
        (("borders",), [0, 5, 4, 20, 97], "borders must rise from 0 to 97"),
        (("borders",), [0, 97], "1 stages; 4 ranks with 1 each make 4"),
        (("borders",), [0, 1, 2, 3.5, 97], "borders is"),
        (("recompute",), [97], r"recompute names layers \[97\]; there are 97"),
        (("predicted", "step_ns"), "fast", "here, predicted: step_ns is 'fast', but should be int"),
    ],
)
def test_what_is_not_a_plan_is_refused(plan, path, value, message):
    with pytest.raises(ConfigError, match=message) as error:
        plan_from_json(changed(plan, *path, value=value), where="here")
    assert "\n" not in str(error.value)


def test_missing_parts_are_named(plan):
    values = plan.to_json()
    del values["inputs"]["model"]
    with pytest.raises(ConfigError, match="here: inputs have no 'model'"):
        plan_from_json(values, where="here")
    with pytest.raises(ConfigError, match="here: plan version None"):
        plan_from_json([], where="here")


def test_files_that_cannot_be_read_are_named(tmp_path):
    with pytest.raises(DataError, match=r"nothing.json: No such file or directory; give the plan.json"):
        read_plan(tmp_path / "nothing.json")
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(DataError, match=r"bad.json: not JSON"):
        read_plan(tmp_path / "bad.json")
