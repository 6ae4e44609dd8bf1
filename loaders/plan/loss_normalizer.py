"""What the losses of a step are divided by, from counts alone: `StepNormalizer`.

For `loaders.plan.steps`. Every rank computes the same divisors, without communication. Weights
other than "token" need each sample's labels, which the index does not have: they are read once.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from balance.loss_weights import LossNormalizer, LossWeights, sample_weights
from balance.types import IntArray
from loaders.plan.epoch_groups import Epoch, PlannedBuild, sample_column


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
        self._total: tuple[Epoch, float] | None = None

    def divisors(self, epoch: Epoch, steps: IntArray, num_loss_tokens: list[int]) -> list[float]:
        """Divisors of steps, whose groups are (steps, dp, micro_batches), -1 for none.

        Of "step" the weights of its labels; of "epoch" those of an average step of the epoch.
        Never 0: 1 where there are no labels.
        """
        if self._normalizer == "epoch":
            total = self._total
            if total is None or total[0] is not epoch:
                total = self._total = epoch, epoch.label_weights(self._weights)
            divisor = total[1] * self._step_groups / max(1, len(epoch)) or 1.0
            return [divisor] * len(steps)
        if self._weights == "token":
            return [float(max(1, number)) for number in num_loss_tokens]
        flat = steps.reshape(len(steps), -1)
        exists = flat >= 0
        groups, step_of_group = flat[exists], np.nonzero(exists)[0]
        labels = sample_column(self._builds, epoch.samples(groups), "num_loss_tokens")
        step_of_sample = np.repeat(step_of_group, epoch.column("num_samples", groups))
        sums = np.bincount(step_of_sample, sample_weights(labels, self._weights), len(steps))
        return [each or 1.0 for each in sums.tolist()]
