"""The names that `loaders` exports: users write them, so they change only on purpose."""

import subprocess
import sys

import loaders

NAMES = [
    "LoaderConfig",
    "LoaderStats",
    "MicroBatch",
    "SampleColumns",
    "Step",
    "StepBatches",
    "StepDataset",
    "StorageOptions",
    "StreamingLoader",
    "model_inputs",
    "normalize",
    "shift_labels",
]


def test_exported_names():
    assert loaders.__all__ == NAMES
    assert all(hasattr(loaders, name) for name in NAMES)


def test_transformers_is_imported_with_the_streaming_trainer_only():
    program = "import loaders, sys; print('transformers' in sys.modules); loaders.StreamingTrainer"
    program += "; print('transformers' in sys.modules)"
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert run.stdout.split() == ["False", "True"]


def test_unknown_names_are_attribute_errors():
    assert not hasattr(loaders, "NoSuchName")
