"""`MicroBatch` as keyword arguments of transformers' models."""
