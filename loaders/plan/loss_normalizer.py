"""What the losses of a step are divided by, from counts alone: `StepNormalizer`.

For `loaders.plan.steps`. Every rank computes the same divisors, without communication. Weights
other than "token" need each sample's labels, which the index does not have: they are read once.
"""

from collections.abc import Sequence

import numpy as np

from isobatch.balance.loss_weights import LossNormalizer, LossWeights, sample_weights
from isobatch.common.types import FloatArray, IntArray
from isobatch.loaders.plan.epoch_groups import Epoch, PlannedBuild, sample_column


class StepNormalizer:
    """Divisors of the steps' losses."""

    def __init__(
        self,
        builds: Sequence[PlannedBuild],
        normalizer: LossNormalizer,
        weights: LossWeights,
        step_groups: int,
    ) -> None:
        """`step_groups`: groups of a whole step."""
        self._builds, self._weights, self._step_groups = builds, weights, step_groups
        self._normalizer = normalizer
        self._mean: tuple[Epoch, float] | None = None

    def weights(self, epoch: Epoch, groups: IntArray) -> FloatArray:
        """Weights of the labels of each group, float64, same shape."""
        if self._weights == "token":
            return epoch.column("num_loss_tokens", groups).astype(np.float64)
        # first, as it measures the samples of groups that come from a state
        owners = np.repeat(np.arange(len(groups)), epoch.column("num_samples", groups))
        labels = sample_column(self._builds, epoch.samples(groups), "num_loss_tokens")
        sums = np.bincount(owners, sample_weights(labels, self._weights), len(groups))
        return np.asarray(sums, np.float64)

    def divisors(self, epoch: Epoch, step_weights: FloatArray) -> FloatArray:
        """Divisors of steps, from the weights of their labels. Never 0: 1 without any label.

        Of "step" those weights; of "epoch" the weights of an average step of the epoch.
        """
        if self._normalizer == "step":
            return np.where(step_weights == 0, 1.0, step_weights)
        mean = self._mean
        if mean is None or mean[0] is not epoch:
            # once, because an epoch that is planned while it runs does not know its length
            size, total = -1, 0.0
            while size != len(epoch):  # a thread has planned more of it since
                size, total = len(epoch), epoch.label_weights(self._weights)
            mean = self._mean = epoch, total / max(1, size) * self._step_groups
        return np.full(len(step_weights), mean[1] or 1.0)
