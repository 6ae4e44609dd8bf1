"""`StandIns`: what TRL, which reads a sample of its datasets, sees of loaders."""

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from loaders.step_stream import StepStream


class StandIns:
    """Datasets to make a trainer with; loaders among `eval_dataset` have stand-ins.

    The evaluation's own samples say what kind they are (with images, with prompts); the training's
    are never looked at.
    """

    def __init__(self, eval_dataset: Any) -> None:
        self._given = eval_dataset
        named = eval_dataset if isinstance(eval_dataset, Mapping) else {"": eval_dataset}
        others = [each for each in named.values() if each is not None and not _is_loader(each)]
        self.has_other_data = bool(others)
        self.train: Any = _first_of(others[0] if others else None)
        self.evaluation: Any = self._replace(eval_dataset)

    def with_loaders(self, made: Any) -> Any:
        """What the trainer has made of `evaluation`, with the loaders in their places."""
        if isinstance(self._given, Mapping):
            return {
                name: each if _is_loader(each) else made[name] for name, each in self._given.items()
            }
        return self._given if _is_loader(self._given) else made

    def _replace(self, dataset: Any) -> Any:
        if isinstance(dataset, Mapping):
            return {name: self._replace(each) for name, each in dataset.items()}
        return self.train if _is_loader(dataset) else dataset


def _is_loader(dataset: Any) -> bool:
    return isinstance(dataset, StepStream)


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
