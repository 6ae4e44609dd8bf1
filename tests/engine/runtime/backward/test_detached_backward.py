"""A stage's outputs are let go of before their gradients come; what the gradients make is the
same.
"""

import gc
import weakref

import pytest
import torch
from torch import nn

from isobatch.engine.runtime.backward import BackwardHandle
from isobatch.engine.runtime.pipeline import Pipeline
from support.models.toy_model import make_model
from support.rank_programs.rank_faults import batches_of
from support.ranks import run_ranks

CUT = 4


@pytest.fixture
def stage():
    """A layer, its input, and two outputs of which the second passes the input on."""
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))
    given = torch.randn(5, 3, requires_grad=True)
    return layer, given, {"made": layer(given), "passed_on": given * 2}


def gradients():
    torch.manual_seed(1)
    return {"made": torch.randn(5, 3), "passed_on": torch.randn(5, 3)}


def expected(layer, given, outputs, came):
    """By autograd itself, from the outputs."""
    tensors = [tensor for name, tensor in outputs.items() if name in came]
    return torch.autograd.grad(
        tensors, [given, *layer.parameters()], list(came.values()), retain_graph=True
    )


def test_backward_is_that_of_the_outputs_themselves(stage):
    layer, given, outputs = stage
    wanted = expected(*stage, gradients())
    BackwardHandle(outputs).backward(gradients())
    for tensor, gradient in zip([given, *layer.parameters()], wanted, strict=True):
        torch.testing.assert_close(tensor.grad, gradient, rtol=0, atol=0)


def test_outputs_without_a_gradient_add_nothing(stage):
    _, given, outputs = stage
    came = {"passed_on": gradients()["passed_on"]}
    BackwardHandle(outputs).backward(came)
    torch.testing.assert_close(given.grad, 2 * came["passed_on"], rtol=0, atol=0)


class Saved:
    """A tensor that autograd keeps for a backward pass."""

    def __init__(self, tensor):
        self.tensor = tensor


@pytest.mark.parametrize("goes_back", [True, False])
def test_outputs_are_freed_while_the_handle_lives_and_the_graph_in_its_pass_or_with_it(goes_back):
    layer = nn.Linear(3, 3)
    given = torch.randn(2, 3, requires_grad=True)
    saved = weakref.WeakSet()

    def keep(tensor):
        packed = Saved(tensor)
        saved.add(packed)
        return packed

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda packed: packed.tensor):
        output = layer(given) + 1  # addition keeps neither what it is given nor what it makes
    freed = weakref.ref(output)
    gc.disable()  # what only circles hold would not be let go of in time
    try:
        handle = BackwardHandle({"output": output})
        del output
        assert freed() is None
        assert saved
        if goes_back:
            handle.backward({"output": torch.ones(2, 3)})
        else:
            del handle
        assert not saved
    finally:
        gc.enable()


def watch_outputs(said):
    """How many outputs of the first stage are alive whenever one of its backward passes comes to
    its end.
    """
    model, made, alive = make_model(), [], []

    def note(_layer, _given, carry):
        made.extend(weakref.ref(tensor) for tensor in carry.values() if tensor.requires_grad)

    model.layers[CUT - 1].register_forward_hook(note)
    weight = next(model.layers[0].parameters())
    weight.register_hook(lambda _: alive.append(sum(output() is not None for output in made)))
    pipeline = Pipeline(model, [0, CUT, len(model.layers)], [False] * len(model.layers), [[0, 1]])
    pipeline.step(batches_of(4), 8)
    said["made"], said["alive"] = len(made), alive


def test_a_stage_holds_no_output_while_its_micro_batches_are_under_way(tmp_path):
    first, _ = run_ranks(tmp_path, 2, watch_outputs)
    assert first == {"made": 4, "alive": [0, 0, 0, 0]}
