"""Weights as the optimizer has them: `MainWeights` makes masters and shards.

In a `TrainingMode` the weights of passes and the parameters of the optimizer may differ: bf16
weights have float32 masters, and with ZeRO-1 each replica updates some rows of every parameter. The
optimizer's parameter of a weight is its `main_param`, the name that Megatron-LM has for it. It is a
`DTensor` where it is shared out, as FSDP2's are, so any optimizer of torch takes it, and
torch.distributed.checkpoint reads and writes it on any number of replicas.

Why not FSDP2 itself: its hooks communicate inside passes, see "Sharded optimizer" in
docs/design.md.
"""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Shard

from isobatch.common.errors import ConfigError
from isobatch.engine.cost_model.training_mode import Precision, TrainingMode
from isobatch.engine.runtime.communication.process_groups import sum_gradients
from isobatch.engine.runtime.errors import peer_errors
from isobatch.engine.runtime.stage_io import Batch, TensorSpec, TensorSpecs

MAIN = "main_param"
# newer torch warns of the old names
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter_rows = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
DTYPE_OF: dict[Precision, torch.dtype] = {"bf16": torch.bfloat16, "fp32": torch.float32}


def main_param(weight: nn.Parameter) -> nn.Parameter:
    """The optimizer's parameter for a weight of a layer; often the weight itself."""
    main: nn.Parameter = getattr(weight, MAIN, weight)
    return main


def local_part(tensor: Tensor) -> Tensor:
    """The part of a tensor that this process holds: all of it, unless it is shared out."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def gather_weight(weight: nn.Parameter) -> None:
    """Set a weight to its `main_param`. All replicas call it for the same weights, in one order."""
    main = main_param(weight)
    if main is weight:
        return
    whole = main.detach().to(weight.dtype)
    if isinstance(whole, DTensor) and _is_even(weight, whole.device_mesh):
        part = whole.to_local().clone()  # the weight's own rows, in float32
        _all_gather(weight.detach(), part, group=whole.device_mesh.get_group())
        return
    weight.copy_(whole.full_tensor() if isinstance(whole, DTensor) else whole)


def _is_even(tensor: Tensor, mesh: DeviceMesh) -> bool:
    """Whether rows are sent and received as they lie in memory.

    A DTensor joins the ranks' rows in further tensors, which no plan counts, and an embedding is
    large: so it is only asked where rows cannot be shared out evenly.
    """
    return tensor.is_contiguous() and tensor.shape[0] % mesh.size() == 0


class MainWeights:
    """The optimizer's parameters for the trained weights of one rank."""

    def __init__(
        self,
        weights: Iterable[nn.Parameter],
        mode: TrainingMode | None,
        replicas: dist.ProcessGroup | None,
    ) -> None:
        """Casts `weights`, each there once, to the mode's precision. ConfigError if it cannot run.

        `mode`: None leaves weights and their dtypes as they are.
        """
        self._replicas = replicas
        self._mesh: DeviceMesh | None = None
        self.weights = list(weights)
        for weight in self.weights:  # of an earlier pipeline
            weight.__dict__.pop(MAIN, None)
        if mode is None:
            return
        if mode.zero_stage > 1 or mode.gradients != "fp32":
            raise ConfigError(
                f"a run has float32 gradients and zero_stage 0 or 1, not {mode.gradients} and"
                f" {mode.zero_stage}: plan for one of these"
            )
        if mode.has_masters and not hasattr(torch.Tensor, "grad_dtype"):
            raise ConfigError(
                "float32 gradients of bf16 weights need torch 2.10 or newer, not"
                f" {torch.__version__}: install it, or train in fp32"
            )
        if mode.zero_stage and replicas is not None and self.weights:
            self._mesh = DeviceMesh.from_group(replicas, self.weights[0].device.type)
        for weight in self.weights:
            self._make_main(weight, mode)

    def share_of(self, weight: nn.Parameter) -> float:
        """This process's share of a sum over replicas of something of a weight's `main_param`."""
        if self._replicas is None or isinstance(main_param(weight), DTensor):
            return 1.0
        return 1 / dist.get_world_size(self._replicas)

    def reduce_gradients(self) -> None:
        """Sum gradients over replicas; the weights' own are then gone where a `main_param` is."""
        trained = [weight for weight in self.weights if weight.requires_grad]
        sharded = [weight for weight in trained if isinstance(main_param(weight), DTensor)]
        whole = [weight for weight in trained if not isinstance(main_param(weight), DTensor)]
        sum_gradients([gradient_of(weight) for weight in whole], self._replicas)
        for weight in whole:
            if main_param(weight) is not weight:
                _hand_over(weight, gradient_of(weight))
        with self._peer_errors():
            for weight in sharded:
                assert self._mesh is not None
                _hand_over(weight, _reduce_scatter(gradient_of(weight), self._mesh))

    def gather(self) -> None:
        """Set all weights to what the optimizer made of them."""
        with self._peer_errors():
            for weight in self.weights:
                gather_weight(weight)

    def drop_gradients(self) -> None:
        """Leave no gradients."""
        for weight in self.weights:
            weight.grad = main_param(weight).grad = None

    def drop_invalid(self) -> None:
        """Drop what a failed step left, which no optimizer's `zero_grad` can."""
        for weight in self.weights:
            if main_param(weight) is not weight:
                weight.grad = None

    def _peer_errors(self) -> AbstractContextManager[None]:
        ranks = [] if self._replicas is None else dist.get_process_group_ranks(self._replicas)
        return peer_errors(ranks) if ranks else nullcontext()

    def _make_main(self, weight: nn.Parameter, mode: TrainingMode) -> None:
        whole = weight.detach().float()
        weight.data = whole if mode.precision == "fp32" else whole.to(DTYPE_OF[mode.precision])
        if not weight.requires_grad:
            return
        if mode.has_masters:  # what passes add up is float32 from the first micro-batch on
            weight.grad_dtype = torch.float32
        if self._mesh is not None and weight.dim():
            main = self._shard(whole, copies=mode.has_masters)
        else:
            main = nn.Parameter(whole) if mode.has_masters else weight
        if main is not weight:
            weight.__dict__[MAIN] = main

    def _shard(self, whole: Tensor, *, copies: bool) -> nn.Parameter:
        """This replica's rows, as `torch.chunk` cuts them: a copy, or a view of the weight."""
        assert self._mesh is not None
        rows = whole.chunk(self._mesh.size())
        rank = self._mesh.get_local_rank()
        rank_rows = rows[rank] if rank < len(rows) else whole[:0]
        local = rank_rows.clone() if copies else rank_rows
        shape, stride = whole.shape, whole.stride()
        return nn.Parameter(
            DTensor.from_local(
                local, self._mesh, [Shard(0)], run_check=False, shape=shape, stride=stride
            )
        )


def gradient_of(weight: nn.Parameter) -> Tensor:
    """A weight's gradient; zeros if no micro-batch used it, as those of other ranks may have."""
    if weight.grad is None:
        dtype = getattr(weight, "grad_dtype", None)  # torch has it from 2.10 on
        weight.grad = torch.zeros_like(weight, dtype=dtype)
    return weight.grad


def message_specs(
    specs: TensorSpecs, mode: TrainingMode, cut: int, batch: Batch
) -> dict[str, TensorSpec]:
    """A model's specs with float32 tensors in the dtype of the mode's messages."""
    dtype = DTYPE_OF[mode.precision]
    return {
        name: replace(spec, dtype=dtype) if spec.dtype == torch.float32 else spec
        for name, spec in specs(cut, batch).items()
    }


def _reduce_scatter(gradient: Tensor, mesh: DeviceMesh) -> DTensor:
    """The sum of a gradient over replicas, rows of it on each."""
    if not _is_even(gradient, mesh):
        whole = DTensor.from_local(gradient, mesh, [Partial()], run_check=False)
        return whole.redistribute(placements=[Shard(0)])
    part = torch.empty_like(gradient[: len(gradient) // mesh.size()])
    _reduce_scatter_rows(part, gradient, group=mesh.get_group())
    return DTensor.from_local(part, mesh, [Shard(0)], run_check=False)


def _hand_over(weight: nn.Parameter, gradient: Tensor) -> None:
    """Add a gradient to that of a weight's `main_param`, and drop the weight's own."""
    weight.grad = None
    main = main_param(weight)
    main.grad = gradient if main.grad is None else main.grad + gradient
