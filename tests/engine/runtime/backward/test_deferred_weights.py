"""Weight gradients computed later are those of one pass, and hold no more than they need."""

import gc
from itertools import product

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from isobatch.engine.runtime.backward import DeferredWeights
from isobatch.engine.runtime.cpu_memory import LiveBytes
from support.cases import for_each


class ByHand(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 5))

    def forward(self, given):
        return given @ self.weight.T


DEFERRED = {
    "linear": (lambda: nn.Linear(5, 3), (2, 7, 5)),
    "linear without a bias": (lambda: nn.Linear(5, 3, bias=False), (7, 5)),
    "linear of one row": (lambda: nn.Linear(5, 3), (5,)),
    "linear of no rows": (lambda: nn.Linear(5, 3), (0, 5)),
    "convolution": (lambda: nn.Conv2d(4, 6, 3, stride=(2, 1), padding=1, groups=2), (2, 4, 9, 8)),
    "of clips": (lambda: nn.Conv1d(3, 5, 3, dilation=2), (2, 3, 12)),
    "of frames": (lambda: nn.Conv3d(3, 5, (2, 3, 3), bias=False), (2, 3, 4, 5, 5)),
}
AT_ONCE = {
    "norm": (lambda: nn.LayerNorm(5), (2, 5)),
    "padded by a word": (lambda: nn.Conv2d(4, 6, 3, padding="same"), (2, 4, 9, 9)),
    "an image without a batch": (lambda: nn.Conv2d(4, 6, 3), (4, 9, 9)),
    "a computed weight": (
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(5, 3)),
        (2, 5),
    ),
    "a product by hand": (ByHand, (2, 5)),
}
HALF = {"dtype": torch.bfloat16, "device_type": "cpu"}


def passes(module, given, gradient, *, autocast, defer):
    """The gradients of input and parameters, after the backward pass and after deferred ones."""
    leaves = [given, *module.parameters()]
    for leaf in leaves:
        leaf.grad = None
    deferred = DeferredWeights()
    with torch.autocast(enabled=autocast, **HALF):
        if defer:
            with deferred:
                made = module(given)
        else:
            made = module(given)
    made.backward(gradient.to(made.dtype))
    at_once = [leaf.grad for leaf in leaves]
    deferred.add_gradients()
    return at_once, [leaf.grad for leaf in leaves]


@for_each(
    ("name", "trained_before", "autocast"),
    product([*DEFERRED, *AT_ONCE], [False, True], [False, True]),
)
def test_gradients_are_those_of_one_pass(name, trained_before, autocast):
    torch.manual_seed(0)
    make, shape = (DEFERRED | AT_ONCE)[name]
    module, given = make(), torch.randn(shape).requires_grad_(trained_before)
    gradient = torch.randn_like(module(given))
    _, wanted = passes(module, given, gradient, autocast=autocast, defer=False)
    at_once, found = passes(module, given, gradient, autocast=autocast, defer=True)
    for own, other in zip(found, wanted, strict=True):
        assert (own is None) == (other is None)
        if own is not None:
            exact = autocast or (name.startswith("linear") and given.dim() > 1)
            most = 0.0 if exact else 1e-6
            assert own.dtype == other.dtype
            assert own.stride() == other.stride()
            assert (own - other).norm() <= most * other.norm()
    is_left = all(own is None for own in at_once[1:])
    assert is_left == (name in DEFERRED and not autocast)


def test_a_frozen_weight_leaves_nothing_for_later_and_a_frozen_bias_gets_nothing():
    module, given = nn.Linear(5, 3), torch.randn(2, 5, requires_grad=True)
    module.weight.requires_grad_(False)
    at_once, found = passes(module, given, torch.ones(2, 3), autocast=False, defer=True)
    assert at_once[1] is None
    assert at_once[2] is not None
    module.weight.requires_grad_(True)
    module.bias.requires_grad_(False)
    at_once, found = passes(module, given, torch.ones(2, 3), autocast=False, defer=True)
    assert at_once[1] is None
    assert found[1] is not None
    assert found[2] is None


def test_a_weight_used_twice_gets_the_sum_and_its_hooks_see_each_part():
    torch.manual_seed(0)
    module, given = nn.Linear(4, 4), torch.randn(3, 4)
    module(module(given)).sum().backward()
    wanted, module.weight.grad = module.weight.grad, None
    seen, deferred = [], DeferredWeights()
    module.weight.register_post_accumulate_grad_hook(seen.append)
    with deferred:
        made = module(module(given))
    made.sum().backward()
    assert not seen
    deferred.add_gradients()
    assert len(seen) == 2
    torch.testing.assert_close(module.weight.grad, wanted, rtol=0, atol=1e-6)


def test_dtypes_that_do_not_fit_are_refused_as_without_it():
    with DeferredWeights(), pytest.raises(RuntimeError, match="dtype"):
        nn.Linear(5, 3)(torch.randn(2, 5).bfloat16())


WIDTH, ROWS, DEEP = 32, 50, 3


def chain():
    """Norms, and maps with an activation between."""
    torch.manual_seed(0)
    return [
        nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)
        )
        for _ in range(DEEP)
    ]


def run_forward(layers, given, context, *, recompute):
    hidden = given
    for layer in layers:

        def run(values, layer=layer):
            with context:
                return layer(values)

        hidden = checkpoint(run, hidden, use_reentrant=False) if recompute else run(hidden)
    return hidden


def test_gradients_of_bf16_weights_are_added_in_the_dtype_that_they_ask_for():
    module, given = nn.Linear(5, 3).bfloat16(), torch.randn(8, 5).bfloat16()
    for weight in module.parameters():
        weight.grad_dtype = torch.float32
    gradient = torch.randn(8, 3).bfloat16()
    _, wanted = passes(module, given, gradient, autocast=False, defer=False)
    _, found = passes(module, given, gradient, autocast=False, defer=True)
    for own, other in zip(found[1:], wanted[1:], strict=True):
        assert own.dtype == torch.float32
        torch.testing.assert_close(own, other, rtol=0, atol=0)


@pytest.mark.parametrize("recompute", [False, True])
def test_between_the_passes_only_inputs_and_output_gradients_of_products_are_held(recompute):
    layers, given = chain(), torch.randn(ROWS, WIDTH)
    for weight in (weight for layer in layers for weight in layer.parameters()):
        weight.grad = torch.zeros_like(weight)
    with LiveBytes() as memory:
        deferred = DeferredWeights()
        made = run_forward(layers, given, deferred, recompute=recompute)
        made.backward(torch.ones_like(made))
        del made
        gc.collect()
        # per layer: norm's output, activation's output; gradients of both products' outputs
        held = DEEP * ROWS * (WIDTH + 2 * WIDTH + 2 * WIDTH + WIDTH) * 4
        assert memory.live_bytes == held
        memory.restart()
        deferred.add_gradients()
        assert memory.live_bytes == 0
        largest = 2 * WIDTH * WIDTH * 4
        assert memory.peak_bytes <= held + 2 * largest


@pytest.mark.parametrize("recompute", [False, True])
def test_both_passes_have_the_flops_of_one_and_each_its_half(recompute):
    layers, given = chain(), torch.randn(ROWS, WIDTH, requires_grad=True)

    def counted(work):
        with FlopCounterMode(display=False) as flops:
            work()
        return flops.get_total_flops()

    forward = counted(lambda: run_forward(layers, given, DeferredWeights(), recompute=False))
    deferred = DeferredWeights()
    made = run_forward(layers, given, deferred, recompute=recompute)
    first = counted(lambda: made.sum().backward())
    # the last product is not recomputed: nothing needs its output
    again = forward - DEEP * 2 * ROWS * 2 * WIDTH * WIDTH if recompute else 0
    assert first == forward + again
    assert counted(deferred.add_gradients) == forward
