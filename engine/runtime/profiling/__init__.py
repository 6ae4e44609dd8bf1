"""Measurements on the running model: layers timed, partitions and recomputation tried."""
