"""A stage of ours for torch's schedules: `TorchStage`, with messages as long as each micro-batch's
specs say.

For `engine.runtime.torch_schedules`, which imports this only with versions of torch that it was
tested with: it replaces private methods of `PipelineStage`. One is made for every step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining._utils import extract_tensor_meta
from torch.distributed.pipelining.stage import _RecvInfo
from torch.utils.checkpoint import checkpoint

from engine.runtime.layer_rng import on_device
from engine.runtime.stage_executor import RankLayers
from engine.runtime.stage_io import LOSS, Batch, StageTensors, TensorSpec


class StageLayers(nn.Module):
    """The layers of a stage as torch wants them: tensors in order in and out, whose names the specs
    give.
    """

    def __init__(self, own: RankLayers, stage: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(own.layers[place] for place in own.of_stage(stage))
        self._own, self._stage = own, stage

    def forward(self, *tensors: Tensor, batch: Batch) -> Tensor | tuple[Tensor, ...]:
        """What crosses the next cut; the last stage gives the loss."""
        own, places = self._own, self._own.of_stage(self._stage)
        carry: StageTensors = dict(zip(_crossing(own, places.start, batch), tensors, strict=True))
        with own.context():
            for place, layer in zip(places, self.layers, strict=True):
                if own.recompute[place]:
                    carry = checkpoint(
                        _run, layer, carry, batch, on_device(own.device), use_reentrant=False
                    )
                else:
                    carry = layer(carry, batch)
        if self._stage == len(own.borders) - 2:
            return carry[LOSS].float()
        goes = (
            (carry[name].to(spec.dtype), spec)
            for name, spec in _crossing(own, places.stop, batch).items()
        )
        return tuple(tensor if spec.differentiable else tensor.detach() for tensor, spec in goes)


def _run(layer: nn.Module, carry: StageTensors, batch: Batch, _: Tensor) -> StageTensors:
    made: StageTensors = layer(carry, batch)
    return made


class TorchStage(PipelineStage):
    """A stage for one step."""

    def __init__(
        self, stage: int, batches: Sequence[Batch], own: RankLayers, group: dist.ProcessGroup
    ) -> None:
        super().__init__(
            StageLayers(own, stage), stage, len(own.borders) - 1, own.device, group=group
        )
        self.has_backward = True  # otherwise torch makes no gradients, and says nothing
        start, end = own.borders[stage], own.borders[stage + 1]
        self._comes = [_metas(own, start, batch) for batch in batches]
        self._goes = [{} if self.is_last else _metas(own, end, batch) for batch in batches]

    def _warmup_forward_vote(
        self, has_backward: bool, received_acc: Tensor | None = None
    ) -> Tensor:
        """No need to ask other ranks whether shapes are known."""
        return torch.ones(())

    def _warmup_backward_result(self, received_result: Tensor | None = None) -> Tensor:
        return torch.ones(())

    def _prepare_forward_infra(
        self,
        num_microbatches: int,
        args: Any,
        kwargs: dict[str, Any] | None = None,
        has_backward: bool = False,
    ) -> None:
        self.chunks = num_microbatches
        for number, metas in enumerate(self._comes):
            self.args_recv_info[number] = self._infos(metas, self.stage_index - 1)
        self._turn_to(0)

    def _prepare_backward_infra(self, num_microbatches: int, *_: Any, **__: Any) -> None:
        for number, metas in enumerate(self._goes):
            gradients = {name: meta if meta.requires_grad else None for name, meta in metas.items()}
            self.grad_recv_info[number] = self._infos(gradients, self.stage_index + 1)

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Buffers are made only now."""
        self._make_buffers(self.args_recv_info[fwd_chunk_id])
        return _not_empty(super().get_fwd_recv_ops(fwd_chunk_id))

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """The same for gradients."""
        self._make_buffers(self.grad_recv_info[bwd_chunk_id])
        return _not_empty(super().get_bwd_recv_ops(bwd_chunk_id))

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """As many tensors as this micro-batch has; the loss goes nowhere."""
        if self.is_last:
            return []
        self._turn_to(fwd_chunk_id)
        return _not_empty(super().get_fwd_send_ops(fwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """The same for gradients."""
        self._turn_to(bwd_chunk_id)
        return _not_empty(super().get_bwd_send_ops(bwd_chunk_id))

    def set_local_bwd_input(
        self, next_stage_bwd_outputs: tuple[Tensor | None, ...], mb_index: int
    ) -> None:
        """What the next stage has no gradient for stays 0."""
        self._make_buffers(self.grad_recv_info[mb_index])
        super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Tensor | None = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> None:
        """And let go of what came in, which torch keeps until the step's end."""
        self._turn_to(bwd_chunk_id)
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        for info in (*self.args_recv_info[bwd_chunk_id], *self.grad_recv_info[bwd_chunk_id]):
            info.buffer = None

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> tuple[tuple[Tensor | None, ...], list[dict[str, Any]] | None]:
        """Gradients of inputs, of weights, or of both.

        torch's own search for the weights between inputs and outputs loses those that no input
        leads to, and fails where a weight is used twice (tied embeddings); so the parts are made as
        `Pipeline` makes them.
        """
        if backward_type == "weight":
            (passed,) = bwd_kwargs["param_groups"]
            _backward(
                passed["outputs"],
                [w for w in self.submod.parameters() if w.requires_grad],
                keep=False,
            )
            return (), None
        made, given = bwd_kwargs["stage_output"], bwd_kwargs["output_grads"]
        made = (made,) if isinstance(made, Tensor) else made
        came = [value for value in bwd_kwargs["input_values"] if isinstance(value, Tensor)]
        outputs = [
            (tensor, gradient)
            for tensor, gradient in zip(made, given or [None] * len(made), strict=True)
            if tensor.requires_grad
        ]
        weights = self.submod.parameters() if backward_type == "full" else ()
        _backward(
            outputs,
            [leaf for leaf in (*came, *weights) if leaf.requires_grad],
            keep=backward_type != "full",
        )
        gradients = tuple(tensor.grad for tensor in came)
        for tensor in came:
            tensor.grad = None
        return gradients, [{"outputs": outputs}]

    def _turn_to(self, number: int) -> None:
        """Let torch take this micro-batch for what all are like."""
        comes, goes = self._comes[number], self._goes[number]
        self._stage_meta.inputs = tuple(comes.values())
        self._stage_meta.input_grads = tuple(
            meta if meta.requires_grad else None for meta in comes.values()
        )
        self._stage_meta.outputs = tuple(goes.values())
        self.act_send_info = {place: [self.stage_index + 1] for place in range(len(goes))}
        self.grad_send_info = [self.stage_index - 1 for _ in comes]

    def _infos(self, metas: Mapping[str, Any], source: int) -> tuple[Any, ...]:
        return tuple(_RecvInfo(name, source, None, meta) for name, meta in metas.items())

    def _make_buffers(self, infos: Iterable[Any]) -> None:
        for info in infos:
            if info.tensor_meta is not None:
                info.buffer = torch.zeros(
                    info.tensor_meta.shape, dtype=info.tensor_meta.dtype, device=self.device
                )


def _metas(own: RankLayers, cut: int, batch: Batch) -> dict[str, Any]:
    """What crosses a cut, as torch describes tensors."""
    flows = own.gradient_comes(cut)
    return {
        name: extract_tensor_meta(
            torch.empty(
                spec.shape,
                dtype=spec.dtype,
                device="meta",
                requires_grad=flows and spec.differentiable,
            )
        )
        for name, spec in _crossing(own, cut, batch).items()
    }


def _backward(
    outputs: Sequence[tuple[Tensor, Tensor | None]], leaves: Sequence[Tensor], *, keep: bool
) -> None:
    """Add to the gradients of `leaves`; `keep`: more will be asked of the same outputs."""
    if outputs and leaves:
        tensors, gradients = zip(*outputs, strict=True)
        torch.autograd.backward(tensors, gradients, inputs=leaves, retain_graph=keep)


def _not_empty(operations: list[dist.P2POp]) -> list[dist.P2POp]:
    return [operation for operation in operations if operation.tensor.numel()]


def _crossing(own: RankLayers, cut: int, batch: Batch) -> dict[str, TensorSpec]:
    """What crosses a cut, by name in order; nothing comes before the first layer."""
    return dict(sorted(own.specs(cut, batch).items())) if cut else {}
