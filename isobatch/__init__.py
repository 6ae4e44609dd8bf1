"""Isobatch: every GPU of a training run does equal work at the same time.

`from isobatch import BalancedLoader, StreamingLoader`; names are imported when they are first used.
`packer`, `loaders` and `engine` are also importable under these short names: the same modules.
"""

from typing import TYPE_CHECKING

from isobatch.common.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from isobatch.balance.dispatching.rollouts import assign_rollouts as assign_rollouts
    from isobatch.common.errors import ConfigError as ConfigError
    from isobatch.common.errors import DataError as DataError
    from isobatch.common.errors import IsobatchError as IsobatchError
    from isobatch.loaders import BalancedLoader as BalancedLoader
    from isobatch.loaders import BalancedMixin as BalancedMixin
    from isobatch.loaders import BalancedTrainer as BalancedTrainer
    from isobatch.loaders import Encoded as Encoded
    from isobatch.loaders import LoaderConfig as LoaderConfig
    from isobatch.loaders import LoaderStats as LoaderStats
    from isobatch.loaders import MicroBatch as MicroBatch
    from isobatch.loaders import PackedBatch as PackedBatch
    from isobatch.loaders import Rebalanced as Rebalanced
    from isobatch.loaders import SampleColumns as SampleColumns
    from isobatch.loaders import SampleCosts as SampleCosts
    from isobatch.loaders import Step as Step
    from isobatch.loaders import StepBatches as StepBatches
    from isobatch.loaders import StepDataset as StepDataset
    from isobatch.loaders import StorageOptions as StorageOptions
    from isobatch.loaders import StreamingLoader as StreamingLoader
    from isobatch.loaders import chunked_loss as chunked_loss
    from isobatch.loaders import dispatch as dispatch
    from isobatch.loaders import model_inputs as model_inputs
    from isobatch.loaders import normalize as normalize
    from isobatch.loaders import packed_batch as packed_batch
    from isobatch.loaders import packed_length as packed_length
    from isobatch.loaders import rebalance as rebalance
    from isobatch.loaders import shift_labels as shift_labels
    from isobatch.packer import BuildConfig as BuildConfig
    from isobatch.packer import Builder as Builder
else:
    __all__, __getattr__, __dir__ = lazy_exports(__name__, __file__)
