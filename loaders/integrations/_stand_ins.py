"""`StandIns`: what TRL, which reads a sample of its datasets, sees of loaders."""

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from isobatch.loaders.step_stream import StepStream


class StandIns:
    """Datasets to make a trainer with; loaders among `eval_dataset` have stand-ins.

    The evaluation's own samples say what kind they are (with images, with prompts); the training's
    are never looked at.
    """

    def __init__(self, eval_dataset: Any) -> None:
        self._given = eval_dataset
        named = eval_dataset if isinstance(eval_dataset, Mapping) else {"": eval_dataset}
        others = [each for each in named.values() if not isinstance(each, StepStream | None)]
        self.has_other_data = bool(others)
        self.train: Any = _first_of(others[0] if others else None)
        self.evaluation: Any = self._replace(eval_dataset)

    def with_loaders(self, made: Any) -> Any:
        """What the trainer has made of `evaluation`, with the loaders in their places."""
        if isinstance(self._given, Mapping):
            own = self._given.items()
            return {key: each if isinstance(each, StepStream) else made[key] for key, each in own}
        return self._given if isinstance(self._given, StepStream) else made

    def _replace(self, dataset: Any) -> Any:
        if isinstance(dataset, Mapping):
            return {name: self._replace(each) for name, each in dataset.items()}
        return self.train if isinstance(dataset, StepStream) else dataset


def _first_of(dataset: Any) -> Any:
    """A dataset of the first sample of `dataset`, or of one that is tokenised."""
    for first, argument in (("select", [0]), ("take", 1)):
        if hasattr(dataset, first):
            return getattr(dataset, first)(argument)
    rows = [{"input_ids": [0], "labels": [0]}]
    if find_spec("datasets") is None:
        return rows  # then it is no trainer of TRL's
    from datasets import Dataset  # noqa: PLC0415  slow to import

    return Dataset.from_list(rows)
