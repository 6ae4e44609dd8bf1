"""The build format, on disk or in an object store; needs no torch.

packer writes builds through it, loaders and engine read. Names are imported when first used.
"""

from typing import TYPE_CHECKING

from isobatch.common.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from isobatch.shards.folders import open_folder as open_folder
    from isobatch.shards.index import GroupIndex as GroupIndex
    from isobatch.shards.manifest import BuildFile as BuildFile
    from isobatch.shards.manifest import Manifest as Manifest
    from isobatch.shards.manifest import is_complete as is_complete
    from isobatch.shards.manifest import read_manifest as read_manifest
    from isobatch.shards.stored_group import StoredGroup as StoredGroup
    from isobatch.shards.tables import SampleTable as SampleTable
    from isobatch.shards.tables import read_groups as read_groups
    from isobatch.shards.tables import read_samples as read_samples
    from isobatch.shards.tables import read_table as read_table
else:
    __all__, __getattr__, __dir__ = lazy_exports(__name__, __file__)
