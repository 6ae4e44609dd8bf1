"""Micro-batches: their tensors, how they are made, and as arguments of transformers' models."""
