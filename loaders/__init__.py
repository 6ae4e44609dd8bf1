"""Balanced micro-batches for training: `from loaders import StreamingLoader`.

What few runs need is imported where it is used: numba's runtime takes .5 s and 100 MB in every
process, pandas, which `pyarrow` imports for some conversions, .2 s and 50 MB.
tests/loaders/test_imports.py sees to it.
"""

try:
    from balance.errors import IsobatchError as _IsobatchError  # noqa: F401  (only to see whose `balance` this is)
except ImportError as _error:
    import balance as _found

    raise ImportError(
        f"`import balance` finds {getattr(_found, '__file__', None) or list(_found.__path__)}, which hides the package "
        "`balance` that Isobatch installs and `loaders` needs; rename yours, or put it inside a package of yours"
    ) from _error

try:
    import torch as _torch  # noqa: F401
except ModuleNotFoundError as _error:
    raise ImportError("`loaders` needs torch: pip install 'isobatch[train]'") from _error

from loaders.batch.micro_batch import MicroBatch, shift_labels
from loaders.batch.model_inputs import model_inputs
from loaders.decode.pixels import normalize
from loaders.integrations.torch_dataset import Step, StepDataset
from loaders.loader import StreamingLoader
from loaders.read.build import StorageOptions
from loaders.stats import LoaderStats

__all__ = [
    "LoaderStats",
    "MicroBatch",
    "Step",
    "StepDataset",
    "StorageOptions",
    "StreamingLoader",
    "model_inputs",
    "normalize",
    "shift_labels",
]
