"""The build format, on disk or in an object store; needs no torch.

packer writes builds through it, loaders and engine read. Names are imported when first used.
"""

from balance.lazy_exports import lazy_exports

__all__, __getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "shards.folders": "open_folder",
        "shards.index": "GroupIndex",
        "shards.manifest": "BuildFile Manifest is_complete read_manifest",
        "shards.stored_group": "StoredGroup",
        "shards.tables": "SampleTable read_groups read_samples read_table",
    },
)
