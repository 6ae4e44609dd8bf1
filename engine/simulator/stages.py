"""Costs of a partition's stages, from those of layers. Pure NumPy.

A partition is its borders: stage s holds the layers `borders[s]:borders[s + 1]`, from 0 to the
number of layers. (OmniBal's P^(i) counts layers from 1: P = (5, 10, 15) for 20 layers is borders
(0, 4, 9, 14, 20).)
"""

from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from isobatch.common.errors import ConfigError
from isobatch.common.types import BoolArray, IntArray
from isobatch.engine.cost_model.costs import Costs


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCosts:
    """A row per stage, a column per micro-batch; int64."""

    forward_ns: IntArray
    input_grad_ns: IntArray
    """Recomputation included."""
    weight_grad_ns: IntArray
    send_ns: IntArray
    """Send of each stage's output to the next; 0 for the last."""
    send_back_ns: IntArray
    """Send of the gradient to the previous stage; 0 for the first, and where none is needed."""
    live_bytes: IntArray
    """Bytes live from the forward pass to the backward pass."""
    forward_peak_bytes: IntArray
    """Peak of the forward pass on top of everything live before."""
    backward_peak_bytes: IntArray
    """Peak of the backward pass on top of everything else live; includes its `live_bytes`."""
    held_bytes: IntArray
    """Bytes live from the backward pass to deferred weight gradients."""
    apart_peak_bytes: IntArray
    """Peak of the backward pass likewise, if weight gradients are deferred."""
    weight_peak_bytes: IntArray
    """Peak of the pass of deferred weight gradients, on top of everything live before."""
    message_bytes: IntArray
    """Messages on their way: the input, the output, and their gradients."""
    state_bytes: IntArray
    """(stages,): weights, gradients, optimizer state."""
    sends_grad: BoolArray
    """(stages,): whether a gradient comes back from the next stage; False for the last."""

    @classmethod
    def of_times(
        cls,
        forward_ns: IntArray,
        input_grad_ns: IntArray,
        weight_grad_ns: IntArray,
        sends_grad: BoolArray,
    ) -> "StageCosts":
        """Stages with these times of passes, without memory and with immediate sends."""
        names = (f.name for f in fields(cls))
        zeros = np.zeros_like(forward_ns)
        values: dict[str, Any] = dict.fromkeys(names, zeros)
        values |= {"forward_ns": forward_ns, "input_grad_ns": input_grad_ns}
        values |= {"weight_grad_ns": weight_grad_ns, "sends_grad": sends_grad}
        return cls(**values | {"state_bytes": np.zeros(len(forward_ns), np.int64)})

    @property
    def num_stages(self) -> int:
        """Number of rows."""
        return int(self.forward_ns.shape[0])

    @property
    def num_micro_batches(self) -> int:
        """Number of columns."""
        return int(self.forward_ns.shape[1])

    @property
    def backward_ns(self) -> IntArray:
        """Both gradients."""
        return self.input_grad_ns + self.weight_grad_ns

    def take(self, indices: IntArray) -> "StageCosts":
        """The same stages for some of the micro-batches, in the order of `indices`."""
        columns = {f.name: getattr(self, f.name) for f in fields(self)}
        taken = {name: column[:, indices] for name, column in columns.items() if column.ndim == 2}
        return StageCosts(**columns | taken)


def check_partition(borders: IntArray, num_layers: int) -> None:
    """ConfigError unless `borders` cut `num_layers` layers into stages of at least one layer."""
    steps = np.diff(borders)
    if len(borders) < 2 or borders[0] != 0 or borders[-1] != num_layers or (steps < 1).any():
        raise ConfigError(
            f"partition {np.asarray(borders).tolist()} of {num_layers} layers; "
            f"borders must rise from 0 to {num_layers}"
        )


def stage_costs(costs: Costs, borders: IntArray, recompute: BoolArray) -> StageCosts:
    """Costs of a partition's stages, where layer l is recomputed if `recompute[l]`.

    Memory: the forward pass leaves each layer's activations, or its input alone. The backward pass
    goes from the last layer to the first; all activations of a recomputed layer are live during its
    turn. What a deferred weight gradient needs stays. Of each kind of message one is on its way.
    """
    check_partition(borders, costs.num_layers)
    if len(recompute) != costs.num_layers:
        raise ConfigError(
            f"recompute names {len(recompute)} layers; the model has {costs.num_layers}"
        )
    chosen = np.asarray(recompute)[:, np.newaxis]
    live = np.where(chosen, costs.kept_bytes, costs.saved_bytes)
    whole = np.maximum(costs.saved_bytes, live)
    # everything up to a layer, and the rest of that layer during its turn, forward or back
    running = np.cumsum(live, axis=0)
    before_layer = running - live
    turn = before_layer + whole + costs.working_bytes
    least = before_layer + whole + np.minimum(costs.working_bytes, costs.input_working_bytes)
    deferred = costs.deferred_bytes
    apart = before_layer + np.maximum(whole, deferred) + costs.input_working_bytes
    starts, last = np.asarray(borders[:-1]), np.asarray(borders[1:]) - 1
    # what the layers after a layer in its stage defer
    summed = np.cumsum(deferred, axis=0)
    apart += summed[np.repeat(last, np.diff(last, prepend=-1))] - summed
    before = np.concatenate([np.zeros_like(running[:1]), running])[starts]
    # the first layer's weight gradients come first, and release what they need
    weights = costs.weight_working_bytes - (summed - deferred)
    released = np.concatenate([np.zeros_like(summed[:1]), summed])[starts]
    messages = message_bytes(costs)
    send, back = np.zeros_like(before), np.zeros_like(before)
    send[:-1] = costs.send_ns[last[:-1]]
    back[1:] = send[:-1] * costs.sends_grad[last[:-1], np.newaxis]
    return StageCosts(
        forward_ns=_sums(costs.forward_ns, starts),
        input_grad_ns=_sums(costs.input_grad_ns + np.where(chosen, costs.recompute_ns, 0), starts),
        weight_grad_ns=_sums(costs.weight_grad_ns, starts),
        send_ns=send,
        send_back_ns=back,
        live_bytes=_sums(live, starts),
        forward_peak_bytes=np.maximum.reduceat(least, starts, axis=0) - before,
        backward_peak_bytes=np.maximum.reduceat(turn, starts, axis=0) - before,
        held_bytes=_sums(deferred, starts),
        apart_peak_bytes=np.maximum.reduceat(apart, starts, axis=0) - before,
        weight_peak_bytes=np.maximum(np.maximum.reduceat(weights, starts, axis=0) + released, 0),
        message_bytes=messages[starts] + messages[last + 1],
        state_bytes=np.add.reduceat(costs.state_bytes, starts),
        sends_grad=np.append(costs.sends_grad[last[:-1]], False),
    )


def message_bytes(costs: Costs) -> IntArray:
    """An output and its gradient at each cut, (layers + 1, micro_batches)."""
    nothing = np.zeros_like(costs.sent_bytes[:1])
    sent = costs.sent_bytes[:-1] * (1 + costs.sends_grad[:-1, np.newaxis])
    return np.concatenate([nothing, sent, nothing])


def _sums(values: IntArray, starts: IntArray) -> IntArray:
    return np.asarray(np.add.reduceat(values, starts, axis=0))
