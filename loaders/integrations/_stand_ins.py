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
        self._eval_dataset = eval_dataset
        named = eval_dataset if isinstance(eval_dataset, Mapping) else {"": eval_dataset}
        others = [
            dataset for dataset in named.values() if not isinstance(dataset, StepStream | None)
        ]
        self.has_other_data = bool(others)
        self.train: Any = _first_of(others[0] if others else None)
        self.evaluation: Any = self._replace(eval_dataset)

    def with_loaders(self, prepared: Any) -> Any:
        """What the trainer has made of `evaluation`, with the loaders in their places."""
        datasets = self._eval_dataset
        if not isinstance(datasets, Mapping):
            return datasets if isinstance(datasets, StepStream) else prepared
        return {
            name: dataset if isinstance(dataset, StepStream) else prepared[name]
            for name, dataset in datasets.items()
        }

    def _replace(self, dataset: Any) -> Any:
        if isinstance(dataset, Mapping):
            return {name: self._replace(part) for name, part in dataset.items()}
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
