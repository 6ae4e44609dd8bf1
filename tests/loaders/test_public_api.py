"""The names that `loaders` exports: users write them, so they change only on purpose."""

import importlib
import subprocess
import sys

import pytest

import loaders

NAMES = [
    "BalancedLoader",
    "BalancedMixin",
    "BalancedTrainer",
    "Encoded",
    "LoaderConfig",
    "LoaderStats",
    "MicroBatch",
    "MovePrediction",
    "PackedBatch",
    "Rebalanced",
    "SampleColumns",
    "SampleCosts",
    "Step",
    "StepBatches",
    "StepDataset",
    "StorageOptions",
    "StreamingLoader",
    "chunked_loss",
    "dispatch",
    "model_inputs",
    "normalize",
    "packed_batch",
    "packed_length",
    "rebalance",
    "shift_labels",
]


def test_exported_names():
    assert loaders.__all__ == NAMES
    assert all(hasattr(loaders, name) for name in NAMES)


def test_transformers_is_imported_with_the_trainers_only():
    names = ", ".join(name for name in NAMES if name not in ("BalancedMixin", "BalancedTrainer"))
    program = f"import sys; sys.modules['transformers'] = None; from loaders import {names}"
    subprocess.run([sys.executable, "-c", program], check=True)  # nothing else asks for it
    pytest.importorskip("transformers")
    trainer = importlib.import_module("transformers").Trainer
    assert issubclass(loaders.BalancedTrainer, (loaders.BalancedMixin, trainer))


def test_a_name_without_its_extra_says_what_to_install():
    for package in ("isobatch", "isobatch.loaders"):
        code = (
            f"import sys; sys.modules['transformers'] = None; from {package} import BalancedMixin"
        )
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        assert done.returncode == 1
        assert done.stderr.splitlines()[-1] == (
            "ModuleNotFoundError: BalancedMixin needs transformers: pip install transformers"
        )


def test_unknown_names_are_attribute_errors():
    assert not hasattr(loaders, "NoSuchName")
