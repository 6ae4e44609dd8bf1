"""DeepSpeed ZeRO-3 on two ranks over gloo, by the programs of docs/load/trainers/deepspeed.md.

It is installed from PyPI into an environment of its own, kept in pytest's cache, so not by default:

    pytest -m other_trainers tests/loaders/trainers/test_deepspeed.py
"""

import json
import shutil
import subprocess
from itertools import chain

import pytest
import torch

from isobatch.loaders import BalancedLoader, StreamingLoader, model_inputs
from support import TESTS, child_env
from support.builds.sample_tables import write_tabled
from support.builds.shard_fixture import group_samples, make_samples
from support.frameworks.environments import python_of

pytestmark = [pytest.mark.other_trainers, pytest.mark.timeout(1200)]
RANKS = TESTS / "support" / "frameworks" / "deepspeed_ranks.py"
RUN_S = 300


@pytest.fixture(scope="module")
def python(request):
    return python_of("deepspeed", request.config.cache.mkdir("frameworks"))


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """A build with text-only groups, whose last step has two empty micro-batches, and a model."""
    from tiny_internvl import make_internvl  # noqa: PLC0415  imports transformers

    folder = tmp_path_factory.mktemp("zero3")
    samples = make_samples(60)
    with_images = [sample for sample in samples if sample.images]
    texts = [sample for sample in samples if not sample.images]
    groups = [*group_samples(texts)[:3], *group_samples(with_images)[-7:]]
    write_tabled(folder / "packed", groups)
    loader = StreamingLoader(folder / "packed", dp_rank=0, dp_world_size=1)
    make_internvl(loader).save_pretrained(folder / "model")
    return folder


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory):
    """Records, without a build, and a model."""
    from support.frameworks.model_and_data import write_records  # noqa: PLC0415

    folder = tmp_path_factory.mktemp("records")
    write_records(folder)
    return folder


@pytest.fixture
def folder(request, data):
    return request.getfixturevalue("packed" if data == "build" else "unpacked")


def run(python, *words):
    done = subprocess.run(
        [python, *map(str, words)],
        env=child_env(
            **{"DS_ACCELERATOR": "cpu", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
            TORCH_EXTENSIONS_DIR=str(python.parents[1] / "extensions"),
        ),
        capture_output=True,
        text=True,
        check=False,
        timeout=RUN_S,
    )
    assert not done.returncode, done.stderr[-4000:]


def on_ranks(python, num_ranks, folder, program, data, out, *words):
    launch = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}")
    run(python, *launch, RANKS, folder, program, data, out, *words)
    return torch.load(folder / f"{out}.pt")


def loaders(folder, data):
    """Those of both ranks."""
    options = {"dp_world_size": 2, "micro_batches_per_step": 2, "check_ranks": False}
    if data == "build":
        return [StreamingLoader(folder / "packed", dp_rank=rank, **options) for rank in range(2)]
    from support.frameworks.model_and_data import MAX_TOKENS  # noqa: PLC0415

    rows = json.loads((folder / "records.json").read_text())
    options |= {"model": str(folder / "model"), "max_tokens": MAX_TOKENS}
    options["seed"] = 42 if data == "records" else 0  # that of TrainingArguments
    return [BalancedLoader(rows, dp_rank=rank, **options) for rank in range(2)]


def alone(folder, data, kind, dtype=torch.float32, **options):
    """(mean loss per label of each step, weights) of a plain loop over both ranks' micro-batches.

    Gradients are clipped, as the page's zero3.json says.
    """
    from transformers import AutoModelForImageTextToText  # noqa: PLC0415

    model = AutoModelForImageTextToText.from_pretrained(folder / "model", dtype=dtype)
    optimizer, losses, seen, unlike = kind(model.parameters(), **options), [], set(), 0
    for ranks in zip(*loaders(folder, data), strict=True):
        total = 0.0
        unlike += sum(
            len({len(batch.pixel_values) > 0 for batch in pair}) > 1
            for pair in zip(*ranks, strict=True)
        )
        for batch in chain(*ranks):
            seen.add((batch.num_samples > 0, len(batch.pixel_values) > 0))
            inputs = model_inputs(batch, model)
            if inputs.get("pixel_values") is not None:
                inputs["pixel_values"] = inputs["pixel_values"].to(dtype)
            loss = model(**inputs).loss
            loss.backward()
            total += float(loss.detach()) * batch.loss_normalizer / batch.num_loss_tokens
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    assert seen == {(False, False), (True, False), (True, True)}
    assert unlike  # a rank has images, the other none
    return losses, model.state_dict()


@pytest.mark.parametrize("data", ["build", "records"])
def test_zero3_by_trainer_trains_as_one_process_and_resumes_on_another_number_of_ranks(
    python, folder, data
):
    trained = on_ranks(python, 2, folder, "deepspeed", data, "trained", 2)
    assert trained["kind"] == "DeepSpeedEngine"
    losses, _ = alone(folder, data, torch.optim.AdamW, lr=3e-3, weight_decay=0.0)
    assert len(losses) == len(trained["losses"]) >= 3
    assert trained["losses"] == pytest.approx(losses, rel=1e-5)
    # as the page says it
    saved = shutil.copytree(folder / "out" / "checkpoint-1", folder / "universal")
    convert = ("-m", "deepspeed.checkpoint.ds_to_universal")
    places = ("--input_folder", saved / "global_step1")
    run(python, *convert, *places, "--output_folder", saved / "global_step1_universal")
    resumed = on_ranks(python, 1, folder, "deepspeed", data, "resumed", 4, "universal")
    assert resumed["losses"][:2] == pytest.approx(trained["losses"][:2], rel=1e-5)
    # it does not bring Adam's count of steps
    assert resumed["losses"] == pytest.approx(trained["losses"], rel=5e-3)


@pytest.mark.parametrize("data", ["build", "loader"])
def test_zero3_by_accelerate_trains_as_one_process(python, folder, data):
    trained = on_ranks(python, 2, folder, "deepspeed_accelerate", data, "accelerated", 2)
    assert trained["kind"] == "DeepSpeedEngine"
    # the norm that clip_grad_norm_ has of float32 is less exact than DeepSpeed's
    _, weights = alone(folder, data, torch.optim.SGD, torch.float64, lr=0.1)
    assert trained["weights"].keys() == weights.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(
            trained["weights"][name].to(weight), weight, rtol=1e-5, atol=1e-7
        )


def test_an_update_after_other_micro_batches_than_a_step_has_is_refused(python, packed, tmp_path):
    code = RANKS.read_text().replace('steps=2", f"steps={micro_batches}"', 'steps=2", "steps=1"')
    other = tmp_path / "other.py"
    other.write_text(code)
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    run(python, *launch, other, packed, "deepspeed_accelerate", "build", "refused", 2)
    refused = torch.load(packed / "refused.pt")["refused"]
    assert "gradient_accumulation_steps=1, so DeepSpeed updates after as many" in refused
