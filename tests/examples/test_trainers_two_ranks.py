"""Two ranks of each trainer take the step that one process takes on the same samples: no averaging
spoils the loss.
"""

import importlib
import importlib.util
import json
from itertools import chain

import pytest
import torch
from tiny_vlm import make_model, token_losses

from isobatch.common.types import LABEL_IGNORE
from isobatch.loaders import StreamingLoader
from isobatch.loaders.batch.model_inputs.inputs import model_inputs
from support import TESTS
from support.builds.sample_tables import write_tabled
from support.builds.shard_fixture import group_samples, make_samples
from support.ranks import launch

# only its ranks import them: that takes seconds in each process that runs tests
NEEDED = ("accelerate", "lightning", "transformers")
if lacking := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
    pytest.skip(f"not installed: {', '.join(lacking)}", allow_module_level=True)

RATE = 0.5
NUM_GROUPS, STEPS = 6, 2
"""Of 2 ranks x 2 micro-batches: the second step has two groups and two empty micro-batches."""

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def build(tmp_path_factory):
    groups = group_samples(make_samples(40))
    # with and without images
    picked = [*groups[:2], *groups[2 - NUM_GROUPS :]]
    return write_tabled(tmp_path_factory.mktemp("packed") / "build", picked)


@pytest.fixture(scope="module")
def trained(build, shared):
    def train(out):
        script = TESTS / "support" / "trainers" / "run_two_ranks.py"
        result = launch(2, out, script, build, out, STEPS, RATE, most_s=200)
        assert result.returncode == 0, result.stderr[-3000:]

    return shared("trainers-on-two-ranks", train)


def load(build, rank):
    return StreamingLoader(build, dp_rank=rank, dp_world_size=2, micro_batches_per_step=2)


def one_process(build, model, part_of_loss):
    """Weights after the same steps, each as the sum over all micro-batches of both ranks."""
    steps = list(zip(load(build, 0), load(build, 1), strict=True))
    assert len(steps) == STEPS
    assert any(batch.num_samples == 0 for batch in chain(*steps[-1]))
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for ranks in steps:
        optimizer.zero_grad()
        for batch in chain(*ranks):
            part_of_loss(model, batch).backward()
        optimizer.step()
    return model.state_dict()


@pytest.mark.parametrize("name", ["hf_trainer", "accelerate", "lightning"])
def test_two_ranks_take_the_step_that_one_process_takes(build, trained, name):
    if name == "lightning":
        torch.manual_seed(0)
        model = make_model(load(build, 0))
        before = {key: weight.clone() for key, weight in model.state_dict().items()}
        expected = one_process(
            build,
            model,
            lambda model, batch: token_losses(model(batch), batch).sum() / batch.loss_normalizer,
        )
    else:
        model = importlib.import_module("tiny_internvl").make_internvl(load(build, 0))
        before = {key: weight.clone() for key, weight in model.state_dict().items()}
        expected = one_process(
            build, model, lambda model, batch: model(**model_inputs(batch, model.config)).loss
        )
    weights = torch.load(trained / f"{name}.pt")
    assert weights.keys() == expected.keys()
    assert any(not torch.equal(before[key], expected[key]) for key in before)
    for key, weight in weights.items():
        torch.testing.assert_close(weight, expected[key], rtol=1e-5, atol=2e-6, msg=key)


def test_an_evaluation_on_two_ranks_is_the_mean_over_all_labels(build, trained):
    loader = StreamingLoader(build, dp_rank=0, dp_world_size=1, shuffle=False)
    batches = [batch for step in loader for batch in step]
    model = importlib.import_module("tiny_internvl").make_internvl(load(build, 0))
    model.load_state_dict(torch.load(trained / "hf_trainer.pt"))
    with torch.no_grad():
        total = sum(
            float(model(**model_inputs(batch, model.config) | {"num_items_in_batch": 1}).loss)
            for batch in batches
        )
    labels = sum(int((batch.labels != LABEL_IGNORE).sum()) for batch in batches)
    found = json.loads((trained / "evaluation.json").read_text())
    assert found["eval_loss"] == pytest.approx(total / labels, rel=1e-5)
