"""Writers of the artefacts that loaders read: shards in three formats, the index, the manifest."""
