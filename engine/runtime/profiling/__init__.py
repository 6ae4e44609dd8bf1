"""Measurements on the running model: layers, partitions, recomputation."""
