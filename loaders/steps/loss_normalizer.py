"""What the losses of a step are divided by, from counts alone: `StepNormalizer`.

For `loaders.steps.steps`. Every rank computes the same divisors, without communication. Weights
other than "token" need each sample's labels, which the index does not have: they are read once.
"""

import numpy as np

from isobatch.balance.loss_weights import LossNormalizer, LossWeights, sample_weights
from isobatch.common.types import FloatArray, IntArray
from isobatch.loaders.steps.source import GroupTable


class StepNormalizer:
    """Divisors of the steps' losses."""

    def __init__(
        self,
        normalizer: LossNormalizer,
        weights: LossWeights,
        step_groups: int,
    ) -> None:
        """`step_groups`: groups of a whole step."""
        self._weights, self._step_groups = weights, step_groups
        self._normalizer = normalizer
        self._mean: tuple[GroupTable, float] | None = None

    def weights(self, table: GroupTable, groups: IntArray) -> FloatArray:
        """Weights of the labels of each group, float64, same shape."""
        if self._weights == "token":
            return table.column("num_loss_tokens", groups).astype(np.float64)
        # first, as it measures the samples of groups that come from a state
        owners = np.repeat(np.arange(len(groups)), table.column("num_samples", groups))
        labels = table.sample_column("num_loss_tokens", table.samples(groups))
        sums = np.bincount(owners, sample_weights(labels, self._weights), len(groups))
        return np.asarray(sums, np.float64)

    def divisors(self, table: GroupTable, step_weights: FloatArray) -> FloatArray:
        """Divisors of steps, from the weights of their labels. Never 0: 1 without any label.

        Of "step" those weights; of "epoch" the weights of an average step of the epoch.
        """
        if self._normalizer == "step":
            return np.where(step_weights == 0, 1.0, step_weights)
        mean = self._mean
        if mean is None or mean[0] is not table:
            # once, because an epoch that is planned while it runs does not know its length
            size, total = -1, 0.0
            while size != len(table):  # a thread has planned more of it since
                size, total = len(table), table.label_weights(self._weights)
            mean = self._mean = table, total / max(1, size) * self._step_groups
        return np.full(len(step_weights), mean[1] or 1.0)
