"""Writing shards: staged samples, packed and checked, group by group."""
