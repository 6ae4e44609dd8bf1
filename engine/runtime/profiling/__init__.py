"""What a running model takes, measured: time and memory per layer, partitions and recomputation
tried for real.
"""
