"""A step of every family waits for its device nowhere: the values that it reads are the host's.

The device is `meta`, which has shapes and no values. So what would make the host wait for a GPU is
an error there: `item`, `tolist`, `nonzero`, masks as indices, sizes from values. Copies between
host and device must be asynchronous.
"""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("transformers")

from isobatch.engine.runtime.communication.p2p import P2PQueue
from isobatch.engine.runtime.models.transformers_models import from_transformers
from isobatch.engine.runtime.pipeline import Pipeline, PipelineOptions
from isobatch.engine.runtime.stage_executor import StageExecutor
from isobatch.engine.runtime.stopwatch import Stopwatch
from isobatch.engine.simulator.schedule import make_schedule
from isobatch.engine.train.models.open_model import RULES
from isobatch.engine.train.models.tiny_vlm import make_tiny_vlm
from isobatch.models.presets import load_model
from support.models import tiny_models
from support.models.family_models import make_family_batch, make_family_model
from support.models.video_samples import make_samples, make_video_model, packed

META = torch.device("meta")
FAMILIES = ("qwen2_5_vl", "qwen3_vl", "llava_next", "llava_onevision", "gemma3")


class NoWaiting(TorchDispatchMode):
    """Counts copies to the device; one that waits, or to the host, is an error."""

    def __init__(self):
        super().__init__()
        self.copies = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        sources = [arg.device.type for arg in args if isinstance(arg, torch.Tensor)]
        target = result.device.type if isinstance(result, torch.Tensor) else "cpu"
        name = func._schema.name
        if name in ("aten::_to_copy", "aten::copy_") and {target, *sources} == {"cpu", "meta"}:
            assert target == "meta", f"{name} to the host"
            is_async = kwargs.get("non_blocking") or (
                name == "aten::copy_" and args[2:3] == (True,)
            )
            assert is_async, f"{name} waits: {func._schema}"
            self.copies += 1
        elif name.startswith("aten::index"):
            lists = [part for arg in args if isinstance(arg, list | tuple) for part in arg]
            indices = [part for part in lists if isinstance(part, torch.Tensor)]
            assert all(part.device.type == sources[0] for part in indices), f"{name} copies indices"
        return result


def test_every_model_of_the_training_command_is_here():
    assert {*tiny_models.NAMES, *FAMILIES} == set(RULES)


@pytest.fixture(scope="module", autouse=True)
def one_rank(tmp_path_factory):
    store = tmp_path_factory.mktemp("ranks") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def run_step(stack, batches, schedule="zero_bubble", recompute=None):
    """Passes of a step on the device; -> copies to it."""
    count = len(stack.layers)
    recompute = recompute or [number % 2 == 0 for number in range(count)]
    options = PipelineOptions(device=META, schedule=schedule)
    pipeline = Pipeline(stack, [0, count], recompute, [[0]], options)
    order = make_schedule(schedule, 1, len(batches))
    step = StageExecutor(pipeline._local, pipeline._groups, order, batches, 7.0, None)
    step._queue = P2PQueue(pipeline._groups, step._p2p.messages, step._specs_of, META)
    with NoWaiting() as mode:
        # all of a step but for the one message that tells ranks the losses
        assert step._run_until_out_of_memory(range(len(order)), Stopwatch(META)) is None
    gradients = [weight.grad for weight in pipeline.parameters() if weight.requires_grad]
    assert any(gradient is not None for gradient in gradients)
    assert {gradient.device.type for gradient in gradients if gradient is not None} == {"meta"}
    return mode.copies


@pytest.mark.parametrize("name", [*tiny_models.NAMES, *FAMILIES])
def test_nothing_in_a_step_waits_for_the_device(name, monkeypatch):
    # which knows no device `meta`
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *_: False)
    is_family = name in FAMILIES
    make_batch = make_family_batch if is_family else tiny_models.make_batch
    model = make_family_model(name) if is_family else tiny_models.make_model(name)
    counts = [(2, 0, 1), (0,), (1,)]
    batches = [make_batch(name, count, seed=seed) for seed, count in enumerate(counts)]
    assert run_step(from_transformers(model), batches) > 0


def test_nothing_in_a_step_of_the_demo_model_waits():
    batches = [tiny_models.make_batch("internvl", (2, 0, 1), seed=seed) for seed in range(2)]
    batches = [  # as many image tokens per tile
        replace(batch, pixel_values=torch.randn(len(batch.pixel_values), 3, 56, 56))
        for batch in batches
    ]
    stack = make_tiny_vlm(load_model("tiny"), tiny_models.VOCAB, tiny_models.IMAGE)
    assert run_step(stack, batches, "1f1b") > 0


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl", "internvl"])
def test_nothing_in_a_step_with_videos_waits(name):
    pytest.importorskip("av")
    batch = packed(name, make_samples(name, ["v", "t", "ivl"], seed=4))
    assert run_step(from_transformers(make_video_model(name)), [batch], "1f1b") > 0
