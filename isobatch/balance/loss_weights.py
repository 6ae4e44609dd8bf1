"""How a step's loss is divided: weights of labels, and the divisor.

The loss of a step is the sum of its labels' losses, each times its weight, over the divisor: the
weights of the step's labels, or those of an average step of the epoch. A weight depends on how many
labels the label's sample has, so all sums follow from counts alone. Token, sample and square
averaging are InternVL 2.5's (arXiv 2412.05271). Pure.
"""

from typing import Literal

import numpy as np

from isobatch.common.types import FloatArray, IntArray

LossWeights = Literal["token", "sample", "square"]
"""A label of a sample with n weighs 1, 1 / n or 1 / sqrt(n)."""
LossNormalizer = Literal["step", "epoch"]
"""Whose weights the divisor sums: the step's labels, or those of an average step."""

_POWERS: dict[LossWeights, float] = {"token": 1.0, "sample": 0.0, "square": 0.5}


def sample_weights(num_loss_tokens: IntArray, weights: LossWeights) -> FloatArray:
    """Sum of the weights of each sample's labels, from their number: n, 1 or sqrt(n); 0 for none.

    >>> sample_weights(np.array([0, 1, 16]), "square").tolist()
    [0.0, 1.0, 4.0]
    """
    powers = num_loss_tokens.astype(np.float64) ** _POWERS[weights]
    return np.where(num_loss_tokens > 0, powers, 0.0)
