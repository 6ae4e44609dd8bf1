"""The loss of a build: every sample once, forward passes alone.

The loader's evaluation mode gives the samples in stored order, whatever the ranks. So the loss
does not depend on partition and replicas, but for roundings, and training goes on as without it.
"""

from typing import Any

import torch

from isobatch.common.errors import ConfigError
from isobatch.common.types import LABEL_IGNORE
from isobatch.engine.runtime.communication.collectives import all_gather
from isobatch.engine.runtime.pipeline import Pipeline
from isobatch.engine.train.step_source import OpenSource, StepSource

SAME = ("model", "image_token_id", "video_token_id", "vocab_size")
"""What an evaluated build has as the one that is trained on."""


def open_evaluation(
    build: str, open_source: OpenSource, options: dict[str, Any], trained: StepSource
) -> StepSource:
    """A build's samples for evaluation; `options` are those of `source_options`. ConfigError."""
    # an empty micro-batch where a replica has fewer than the others
    source = open_source(build, **options, shuffle=False, remainder="pad")
    differing = [name for name in SAME if getattr(source, name) != getattr(trained, name)]
    if differing:
        raise ConfigError(
            f"--eval {build} has another {differing[0].replace('_', ' ')} than the build that is"
            " trained on: pack both with the same --model and --tokenizer"
        )
    return source


def evaluate(pipeline: Pipeline, source: StepSource, num_ranks: int) -> float:
    """Mean loss of all labels, 0 without any. All ranks call it; `num_ranks` per pipeline."""
    sums = torch.zeros(2, dtype=torch.float64)
    for step in source:
        sums[0] += pipeline.evaluate(list(step))
        sums[1] += sum(int((batch.labels != LABEL_IGNORE).sum()) for batch in step)
    loss, labels = (torch.stack(all_gather(sums)).sum(0) / num_ranks).tolist()
    return float(loss / max(1.0, labels))
