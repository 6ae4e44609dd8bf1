"""The four trainer examples: killed in the middle of an epoch, they go on with exactly the samples
that are left.
"""

import importlib
from collections import Counter
from itertools import islice

import pytest
import torch

from isobatch.loaders import StreamingLoader
from support.builds.shard_fixture import group_samples, make_samples, write_build

NUM_SAMPLES, SAVE_EVERY = 70, 3
KILLED_IN_STEP = 5
"""Counted from 0; two steps behind the last save, so that these are trained on again."""

torch.set_num_threads(1)

# example: what it needs, where a micro-batch passes in the order of training (module, name)
EXAMPLE_OF = {
    "train_hf_trainer": ("accelerate", "isobatch.loaders.integrations.hf_trainer", "model_inputs"),
    "train_accelerate": ("accelerate", "train_accelerate", "model_inputs"),
    "train_lightning": ("lightning", "train_lightning", "token_losses"),
    "train_dataloader": ("torch", "tiny_vlm", "token_losses"),
}
COUNTS_ALL_STEPS = ("train_hf_trainer", "train_lightning")
"""Their --steps counts those of earlier calls too."""


class Killed(BaseException):
    """Passes every handler that a trainer may have."""


@pytest.fixture(scope="module")
def samples():
    return make_samples(NUM_SAMPLES)


@pytest.fixture(scope="module")
def build(samples, tmp_path_factory):
    return write_build(tmp_path_factory.mktemp("packed") / "build", group_samples(samples))


@pytest.fixture(params=EXAMPLE_OF)
def example(request, monkeypatch):
    """`train(out, steps, done=0, micro_batches=2, kill_in_step=None)` -> ids of each micro-batch
    trained on.
    """
    needs, module, function = EXAMPLE_OF[request.param]
    pytest.importorskip(needs)
    script, patched = importlib.import_module(request.param), importlib.import_module(module)
    original = getattr(patched, function)

    def train(build, out, steps, *, done=0, micro_batches=2, kill_in_step=None):
        seen = []

        def watched(*arguments, **options):
            batch = next(value for value in arguments if hasattr(value, "sample_ids"))
            if kill_in_step is not None and len(seen) == kill_in_step * micro_batches:
                raise Killed
            seen.append(batch.sample_ids)
            return original(*arguments, **options)

        monkeypatch.setattr(patched, function, watched)
        total = steps + (done if request.param in COUNTS_ALL_STEPS else 0)
        options = {
            "--steps": total,
            "--save-every": SAVE_EVERY,
            "--micro-batches-per-step": micro_batches,
        }
        arguments = [
            str(build),
            str(out),
            *(str(part) for option in options.items() for part in option),
        ]
        if kill_in_step is None:
            script.main(arguments)
        else:
            with pytest.raises(Killed):
                script.main(arguments)
        return seen

    return train


def expected_ids(build, steps, micro_batches=2):
    """Ids of the micro-batches of the first steps, epoch after epoch."""
    loader = StreamingLoader(
        build, dp_rank=0, dp_world_size=1, micro_batches_per_step=micro_batches
    )

    def endless():
        while True:
            yield from loader

    return [batch.sample_ids for step in islice(endless(), steps) for batch in step]


def weights(out):
    """All tensors of the model in the last checkpoint."""
    if out.is_file():
        return torch.load(out)["model"]
    if (out / "last.ckpt").exists():
        return torch.load(out / "last.ckpt", weights_only=False)["state_dict"]
    load_file = pytest.importorskip("safetensors.torch").load_file
    files = sorted(out.rglob("model.safetensors"), key=lambda file: (len(str(file)), str(file)))
    return load_file(files[-1])


def test_a_killed_run_goes_on_as_if_nothing_had_happened(example, build, samples, tmp_path):
    epoch = len(StreamingLoader(build, dp_rank=0, dp_world_size=1, micro_batches_per_step=2))
    steps = epoch + 2
    whole = example(build, tmp_path / "whole", steps)
    assert whole == expected_ids(build, steps)
    assert Counter(i for ids in whole[: 2 * epoch] for i in ids) == Counter(
        sample.sample_id for sample in samples
    )
    before = example(build, tmp_path / "killed", steps, kill_in_step=KILLED_IN_STEP)
    after = example(build, tmp_path / "killed", steps - SAVE_EVERY, done=SAVE_EVERY)
    assert len(before) == 2 * KILLED_IN_STEP
    assert before[: 2 * SAVE_EVERY] + after == whole
    one, other = weights(tmp_path / "whole"), weights(tmp_path / "killed")
    assert one.keys() == other.keys()
    for name, weight in one.items():
        torch.testing.assert_close(weight, other[name], rtol=1e-5, atol=1e-6, msg=name)


def test_a_killed_run_goes_on_with_other_micro_batches_per_step(example, build, samples, tmp_path):
    before = example(build, tmp_path / "out", 100, kill_in_step=KILLED_IN_STEP)[: 2 * SAVE_EVERY]
    num_groups = len(StreamingLoader(build, dp_rank=0, dp_world_size=1))
    left = -(-(num_groups - 2 * SAVE_EVERY) // 3)
    after = example(build, tmp_path / "out", left, done=SAVE_EVERY, micro_batches=3)
    assert len(after) == 3 * left
    assert Counter(i for ids in before + after for i in ids) == Counter(
        sample.sample_id for sample in samples
    )


def test_a_build_that_cannot_be_used_is_an_error(example, tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        example(tmp_path, tmp_path / "out", 1)
    assert ended.value.code == 2
    assert "no finished build" in capsys.readouterr().err.splitlines()[-1]
