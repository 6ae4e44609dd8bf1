"""Backward passes through a stage: both gradients at once, or weights' later.

`BackwardHandle` starts a pass, `DeferredWeights` puts off weight gradients.

Autograd needs from an output only the place in the graph where its gradient enters. So while later
stages run, a micro-batch in flight does not keep its outputs; the sender releases them.

A zero-bubble schedule first computes the gradient of a stage's input, which the previous stage
waits for, and the gradients of the weights later. Autograd computes both in one pass, and a second
pass would repeat the chain of gradients and every recomputation. Here a product (linear map or
convolution) only notes in the backward pass what its weight gradient needs: its input and the
gradient of its output. The rest of the graph is freed by that pass; the noted products follow when
the schedule says. So the FLOPs are those of one pass, whatever is recomputed.

Weights of other operations (norms, embeddings, `x @ w`) get their gradients in the first pass.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from isobatch.engine.runtime.stage_io import StageTensors


@dataclass(slots=True)
class _Product:
    """A linear map or a convolution in a graph, and what its weight gradient needs."""

    call: Callable[..., Tensor]
    weight: Tensor
    bias: Tensor | None
    options: Mapping[str, Any]
    """Stride, padding, dilation and groups of a convolution."""
    inputs: Tensor | None = None
    gradient: Tensor | None = None
    """That of the output; both are known after the backward pass."""

    def forward(self, inputs: Tensor) -> Tensor:
        return self.call(inputs, self.weight, self.bias, **self.options)

    def input_gradient(self, gradient: Tensor, shape: torch.Size) -> Tensor:
        if not self.options:
            return gradient @ self.weight
        inputs = gradient.new_empty(1).expand(shape)  # its values do not matter
        return self._convolution_backward(gradient, inputs, of_input=True)

    def add_weight_gradients(self) -> None:
        """Add them through autograd, so that hooks on weights see them."""
        inputs, gradient = self.inputs, self.gradient
        assert inputs is not None
        assert gradient is not None
        weights, gradients = [self.weight], []
        with torch.no_grad():
            if self.options:
                weight_gradient = self._convolution_backward(gradient, inputs, of_input=False)
            else:
                rows = inputs.reshape(-1, inputs.shape[-1])
                weight_gradient = gradient.reshape(-1, gradient.shape[-1]).t() @ rows
            gradients.append(weight_gradient)
            if self.bias is not None and self.bias.requires_grad:
                channels = 1 if self.options else gradient.dim() - 1
                others = [dim for dim in range(gradient.dim()) if dim != channels]
                weights.append(self.bias)
                gradients.append(gradient.sum(others) if others else gradient)
        torch.autograd.backward(weights, gradients)

    def _convolution_backward(self, gradient: Tensor, inputs: Tensor, *, of_input: bool) -> Tensor:
        options = self.options
        masks = [of_input, not of_input, False]
        sizes = options["stride"], options["padding"], options["dilation"]
        no_output_padding = [0] * len(options["stride"])
        tensors = gradient, inputs, self.weight
        gradients = torch.ops.aten.convolution_backward(
            *tensors, None, *sizes, False, no_output_padding, options["groups"], masks
        )
        result: Tensor = gradients[0 if of_input else 1]
        return result


class _KeepInput(torch.autograd.Function):
    """Keeps a product's input, from before the product on: a recomputation ends with the last
    tensor that is kept, and must not run the last product.
    """

    @staticmethod
    def forward(
        ctx: Any, start: Tensor, noted: list[_Product], product: _Product, inputs: Tensor
    ) -> Tensor:
        ctx.noted, ctx.product = noted, product
        ctx.save_for_backward(inputs)
        return start.clone()

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[None, ...]:
        (inputs,) = ctx.saved_tensors
        ctx.product.inputs = inputs.detach()
        ctx.noted.append(ctx.product)
        return None, None, None, None


class _RunProduct(torch.autograd.Function):
    """A product whose backward pass computes the gradient of its input alone."""

    @staticmethod
    def forward(ctx: Any, marker: Tensor, product: _Product, inputs: Tensor) -> Tensor:
        ctx.product, ctx.input_shape, ctx.marker_shape = product, inputs.shape, marker.shape
        return product.forward(inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        ctx.product.gradient = gradient
        back = None
        if ctx.needs_input_grad[2]:
            back = ctx.product.input_gradient(gradient, ctx.input_shape)
        return gradient.new_empty(ctx.marker_shape), None, back


class DeferredWeights(TorchFunctionMode):
    """Defers weight gradients of what runs while it is entered, for a stage and micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        # the graph holds this list, not this object; the list holds no graph
        self._noted: list[_Product] = []

    def add_gradients(self) -> None:
        """Add the weight gradients that the backward pass left, releasing what each one needs."""
        while self._noted:
            self._noted.pop().add_weight_gradients()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operation; a product with a trained weight defers that weight's gradient."""
        kwargs = dict(kwargs or {})
        names = _ARGUMENTS.get(func)
        if names is None or not torch.is_grad_enabled():
            return func(*args, **kwargs)
        arguments = dict(zip(names, args, strict=False)) | kwargs
        inputs = arguments.pop("input")
        product = _product(func, inputs, arguments)
        if product is None:
            return func(*args, **kwargs)
        # so a first layer has a gradient, of a leaf that nobody asks for it
        start = torch.empty(0, device=inputs.device, requires_grad=True)
        marker = _KeepInput.apply(start, self._noted, product, inputs)  # type: ignore[no-untyped-call]
        return _RunProduct.apply(marker, product, inputs)  # type: ignore[no-untyped-call]


_OPTIONS = {"stride": 1, "padding": 0, "dilation": 1, "groups": 1}
_CONVOLUTIONS = (torch.conv1d, torch.conv2d, torch.conv3d)
_ARGUMENTS: dict[Callable[..., Any], tuple[str, ...]] = {
    functional.linear: ("input", "weight", "bias"),
    **dict.fromkeys(_CONVOLUTIONS, ("input", "weight", "bias", *_OPTIONS)),
}
"""Names of a product's arguments, in order."""


def _product(
    call: Callable[..., Tensor], inputs: Tensor, arguments: Mapping[str, Any]
) -> _Product | None:
    """The product if it can be deferred: of plain parameters, in their own dtype.

    Not a convolution without a batch, or with a padding that is a word.
    """
    weight, bias = arguments["weight"], arguments.get("bias")
    is_plain = type(weight) is nn.Parameter and (bias is None or type(bias) is nn.Parameter)
    is_cast = inputs.dtype != weight.dtype or torch.is_autocast_enabled(inputs.device.type)
    if not is_plain or not weight.requires_grad or is_cast:
        return None
    if call not in _CONVOLUTIONS:
        return _Product(call, weight, bias, {})
    options = {name: arguments.get(name, value) for name, value in _OPTIONS.items()}
    if inputs.dim() != weight.dim() or isinstance(options["padding"], str):
        return None
    for name in ("stride", "padding", "dilation"):
        if isinstance(options[name], int):
            options[name] = [options[name]] * (weight.dim() - 2)
    return _Product(call, weight, bias, options)


class _JoinOutputs(torch.autograd.Function):
    """Maps any number of tensors to an empty one; backward reads their gradients from a dict."""

    @staticmethod
    def forward(
        ctx: Any, gradients: StageTensors, names: Sequence[str], *outputs: Tensor
    ) -> Tensor:
        ctx.gradients, ctx.names = gradients, names
        return outputs[0].new_empty(0)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        return (None, None, *(ctx.gradients.get(name) for name in ctx.names))


class BackwardHandle:
    """Starts the backward pass through a stage, once."""

    def __init__(self, outputs: Mapping[str, Tensor]) -> None:
        """`outputs`: at least one, all with a gradient."""
        # the graph must not hold this object: a cycle would keep the graph until gc finds it
        self._gradients: StageTensors = {}
        self._end: Tensor = _JoinOutputs.apply(  # type: ignore[no-untyped-call]
            self._gradients, tuple(outputs), *outputs.values()
        )

    def backward(self, gradients: Mapping[str, Tensor]) -> None:
        """Add to the gradients of all leaves, given those of the outputs; frees the graph."""
        self._gradients.update(gradients)
        torch.autograd.backward(self._end, torch.zeros_like(self._end))
        self._gradients.clear()
