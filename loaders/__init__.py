"""Balanced micro-batches for training: `from loaders import StreamingLoader`.

Imports what every run needs and no more: numba's runtime takes .5 s and 100 MB in every process,
pandas, which `pyarrow` imports for some conversions, .2 s and 50 MB. So modules that need them are
imported in the functions that use them; tests/loaders/test_imports.py checks that.
"""

from typing import TYPE_CHECKING, Any

try:
    from balance.errors import IsobatchError as _IsobatchError  # noqa: F401
except ImportError as _error:
    import balance as _found

    _where = getattr(_found, "__file__", None) or list(_found.__path__)
    raise ImportError(
        f"`import balance` finds {_where}, which hides the package `balance` that Isobatch "
        "installs and `loaders` needs; rename yours, or put it inside a package of yours"
    ) from _error

try:
    import torch as _torch  # noqa: F401
except ModuleNotFoundError as _error:
    raise ImportError("`loaders` needs torch: pip install 'isobatch[train]'") from _error

from loaders.batch.micro_batch import MicroBatch, shift_labels
from loaders.batch.model_inputs.inputs import model_inputs
from loaders.config import LoaderConfig
from loaders.decode.pixels import normalize
from loaders.integrations.torch_dataset import Step, StepDataset
from loaders.loader import StreamingLoader
from loaders.online.encoded import Encoded
from loaders.plan.sample_choice import SampleColumns
from loaders.read.build import StorageOptions
from loaders.stats import LoaderStats
from loaders.step_builder import StepBatches

if TYPE_CHECKING:
    from loaders.integrations.hf_trainer import BalancedMixin as BalancedMixin
    from loaders.integrations.hf_trainer import BalancedTrainer as BalancedTrainer
    from loaders.online.loader import BalancedLoader as BalancedLoader

__all__ = [
    "Encoded",
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


def __getattr__(name: str) -> Any:
    """`BalancedMixin` and `BalancedTrainer`, which need transformers, `BalancedLoader` `packer`."""
    if name == "BalancedLoader":
        from loaders.online.loader import BalancedLoader  # noqa: PLC0415

        return BalancedLoader
    if name in ("BalancedMixin", "BalancedTrainer"):
        from loaders.integrations import hf_trainer  # noqa: PLC0415

        return getattr(hf_trainer, name)
    if name == "StreamingTrainer":
        # `from loaders import` would hide an AttributeError's text
        raise ImportError(
            "StreamingTrainer(loader=loader) is now BalancedTrainer(train_dataset=loader)"
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
