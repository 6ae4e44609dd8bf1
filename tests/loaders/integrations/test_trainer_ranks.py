"""BalancedTrainer on two ranks by DDP and FSDP: an epoch ends and resumes as on one process."""

import importlib.util
import json
from itertools import chain

import pytest
import torch

from isobatch.loaders import BalancedLoader, StreamingLoader, model_inputs
from support import TESTS
from support.builds.sample_tables import write_tabled
from support.builds.shard_fixture import group_samples, make_samples
from support.loading.evaluations import loss_of_each
from support.loading.online_data import OPTIONS, records
from support.ranks import launch

# only its ranks import them: that takes seconds in each process that runs tests
NEEDED = ("accelerate", "transformers")
if lacking := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
    pytest.skip(f"not installed: {', '.join(lacking)}", allow_module_level=True)

RATE, STEPS = 3e-3, 3
NUM_GROUPS = 10
"""Of 2 ranks x 2 micro-batches: the last step has two empty micro-batches."""

torch.set_num_threads(1)


def losses_of_one_process(build):
    """Mean loss per label of each step, summed over the micro-batches of both ranks."""
    from tiny_internvl import make_internvl  # noqa: PLC0415  imports transformers

    options = {"dp_world_size": 2, "micro_batches_per_step": 2, "check_ranks": False}
    loaders = [StreamingLoader(build, dp_rank=rank, **options) for rank in range(2)]
    model, found, num_empty = make_internvl(loaders[0]), [], 0
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    for ranks in zip(*loaders, strict=True):
        total = 0.0
        for batch in chain(*ranks):
            num_empty += batch.num_samples == 0
            loss = model(**model_inputs(batch, model.config)).loss
            loss.backward()
            total += float(loss.detach()) * batch.loss_normalizer / batch.num_loss_tokens
        optimizer.step()
        optimizer.zero_grad()
        found.append(total)
    assert (len(found), num_empty) == (STEPS, 2)
    return found


def test_an_epoch_by_ddp_and_fsdp_ends_and_resumes_as_on_one_process(tmp_path):
    groups = group_samples(make_samples(40))
    # with and without images
    build = write_tabled(tmp_path / "build", [*groups[:2], *groups[2 - NUM_GROUPS :]])
    script, out = TESTS / "support" / "trainers" / "fsdp_ranks.py", tmp_path / "out"
    result = launch(2, out, script, build, out, RATE, most_s=200)
    assert result.returncode == 0, result.stderr[-3000:]
    expected = losses_of_one_process(build)
    for name, wrapper in (("ddp", "DistributedDataParallel"), ("fsdp", "FSDPInternVL")):
        trained = torch.load(out / f"{name}.pt")
        assert trained["kind"].startswith(wrapper)
        losses, weights = trained["whole"]
        assert losses == pytest.approx(expected, rel=1e-5), name
        assert trained["resumed"][0] == losses, name
        for key, weight in weights.items():
            assert torch.equal(weight, trained["resumed"][1][key]), (name, key)


def test_losses_and_gradients_on_two_ranks_are_those_of_each_sample_in_one_process(tmp_path):
    from tiny_internvl import make_internvl  # noqa: PLC0415  imports transformers

    from support.trainers.step_gradients import (  # noqa: PLC0415  imports transformers
        check_gradients,
        gradients_of_trainer,
    )

    rows = records(tmp_path, 21)
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    script, out = TESTS / "support" / "trainers" / "evaluation_ranks.py", tmp_path / "found.pt"
    result = launch(2, tmp_path / "log", script, tmp_path, out, most_s=200)
    assert result.returncode == 0, result.stderr[-3000:]
    found = torch.load(out)
    packing = OPTIONS | {"data_root": str(tmp_path)}
    model = make_internvl(BalancedLoader(rows, **packing))
    model.load_state_dict(found["weights"])
    # a rank without a sample waits for nobody: evaluations reduce nothing in DDP's forward pass
    for name, count in (("all", 21), ("two", 2), ("one", 1)):
        expected = loss_of_each(model, rows[:count], packing)
        assert found["losses"][f"eval_{name}_loss"] == pytest.approx(expected, rel=1e-6), name
    # the gradients of a step, by a plain loop over its samples
    divisors = set()
    for normalizer in ("epoch", "step"):
        options = packing | {"loss_normalizer": normalizer}
        ranks = [torch.load(tmp_path / f"{normalizer}-{rank}.pt") for rank in range(2)]
        divisors.add(check_gradients(ranks, rows, options))
        for is_packed in (True, False):
            options["packing"] = is_packed
            alone = gradients_of_trainer(rows, options, tmp_path / "alone", accumulation=3)
            divisors.add(check_gradients([alone], rows, options))
    assert len(divisors) == 6
