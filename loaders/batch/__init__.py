"""Micro-batches: their tensors, and transformers' arguments made of them."""
