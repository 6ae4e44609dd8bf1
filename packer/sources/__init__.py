"""Raw layouts: one file each, streaming records in their order on disk."""
