"""The planning example, really launched: what it writes is a profile, evidence, and a plan that the training takes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path[:0] = [str(EXAMPLES), str(Path(__file__).parents[1] / "loaders")]

from plan_pipeline import SHARES, first_samples  # noqa: E402
from shard_fixture import group_samples, make_samples, write_build  # noqa: E402
from tiny_vlm_layers import make_layers  # noqa: E402
from train_tiny import make_model  # noqa: E402

from engine.plan import read_plan  # noqa: E402
from engine.profile_costs import profiled_costs, read_profile  # noqa: E402
from loaders import StreamingLoader  # noqa: E402

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def build(tmp_path_factory):
    groups = group_samples(make_samples(80))
    return write_build(tmp_path_factory.mktemp("packed") / "build", groups)


def launch(script, build, **options):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    named = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    command = [*launcher, str(EXAMPLES / script), str(build), "--device=cpu", *named]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=120, env=environment)


@pytest.mark.slow
def test_a_measured_plan_is_one_that_training_takes(build, tmp_path):
    out = tmp_path / "plan"
    result = launch("plan_pipeline.py", build, out=out, micro_batches_per_step=3, most_run=3)
    assert result.returncode == 0, result.stderr[-3000:]
    evidence = json.loads((out / "evidence.json").read_text())
    plan = read_plan(out / "plan.json")
    assert list(plan.borders) == evidence["chosen"]
    assert 3 <= len(evidence["candidates"]) <= 4  # the anchor is run in any case
    assert all(len(row["steps_ms"]) == 3 for row in evidence["candidates"])
    profile = read_profile(out / "profile.json")
    chosen = next(row for row in evidence["candidates"] if row["borders"] == evidence["chosen"])
    assert plan.predicted.step_ns == round(1e6 * chosen["predicted_ms"])
    assert (profiled_costs(profile, plan.loads).forward_ns.sum(axis=0) > 0).all()
    assert f"{evidence['chosen']}  <- chosen" in result.stdout
    trained = launch("train_pipeline.py", build, plan=out / "plan.json", steps=1, figures=tmp_path / "figures.jsonl")
    assert trained.returncode == 0, trained.stderr[-3000:]
    assert json.loads((tmp_path / "figures.jsonl").read_text())["loss"] > 0


def test_the_first_samples_of_a_micro_batch_have_their_images(build):
    loader = StreamingLoader(build, dp_rank=0, dp_world_size=1)
    bare = StreamingLoader(build, dp_rank=0, dp_world_size=1, decode_images=False)
    model = make_layers(make_model(loader))
    for (batch,), (undecoded,) in zip(loader, bare, strict=True):
        losses = []
        for share in (*SHARES, 1.0):
            part = first_samples(batch, share, loader.image_token_id)
            carry = {}
            for layer in model.layers:
                carry = layer(carry, part)  # the embedding refuses other features than there are image tokens
            losses.append(float(carry["loss"].detach()))
            other = first_samples(undecoded, share, loader.image_token_id)
            assert torch.equal(part.patches_per_image, other.patches_per_image)
            assert len(part.pixel_values) == int(part.patches_per_image.sum())
            assert len(part.sample_ids) == len(part.cu_seqlens) - 1 == round(share * batch.num_samples)
        assert losses == sorted(losses)
        assert part.sample_ids == batch.sample_ids
