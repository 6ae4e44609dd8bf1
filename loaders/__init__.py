"""Balanced micro-batches for training: `from isobatch import StreamingLoader`.

Imports what every run needs and no more: numba's runtime takes .5 s and 100 MB in every process,
pandas, which `pyarrow` imports for some conversions, .2 s and 50 MB. So modules that need them are
imported in the functions that use them; tests/loaders/test_imports.py checks that.
"""

from importlib.util import find_spec
from typing import TYPE_CHECKING

from isobatch.common.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from isobatch.loaders.batch.chunked_loss import chunked_loss as chunked_loss
    from isobatch.loaders.batch.micro_batch import MicroBatch as MicroBatch
    from isobatch.loaders.batch.micro_batch import shift_labels as shift_labels
    from isobatch.loaders.batch.model_inputs.inputs import model_inputs as model_inputs
    from isobatch.loaders.batch.packed import PackedBatch as PackedBatch
    from isobatch.loaders.batch.packed import packed_batch as packed_batch
    from isobatch.loaders.batch.packed import packed_length as packed_length
    from isobatch.loaders.config import LoaderConfig as LoaderConfig
    from isobatch.loaders.decode.pixels import normalize as normalize
    from isobatch.loaders.integrations.hf_trainer import BalancedMixin as BalancedMixin
    from isobatch.loaders.integrations.hf_trainer import BalancedTrainer as BalancedTrainer
    from isobatch.loaders.integrations.torch_dataset import Step as Step
    from isobatch.loaders.integrations.torch_dataset import StepDataset as StepDataset
    from isobatch.loaders.loader import StreamingLoader as StreamingLoader
    from isobatch.loaders.online.encoded import Encoded as Encoded
    from isobatch.loaders.online.loader import BalancedLoader as BalancedLoader
    from isobatch.loaders.ranks.dispatch import dispatch as dispatch
    from isobatch.loaders.ranks.rebalance import MovePrediction as MovePrediction
    from isobatch.loaders.ranks.rebalance import Rebalanced as Rebalanced
    from isobatch.loaders.ranks.rebalance import SampleCosts as SampleCosts
    from isobatch.loaders.ranks.rebalance import rebalance as rebalance
    from isobatch.loaders.read.build import StorageOptions as StorageOptions
    from isobatch.loaders.sample_choice import SampleColumns as SampleColumns
    from isobatch.loaders.stats import LoaderStats as LoaderStats
    from isobatch.loaders.step_builder import StepBatches as StepBatches
else:
    if find_spec("torch") is None:
        raise ImportError("`loaders` needs torch: pip install torch simplejpeg")
    __all__, __getattr__, __dir__ = lazy_exports(__name__, __file__)
