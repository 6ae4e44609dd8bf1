"""Reading groups of finished builds, on disk or through a cache from a store."""
