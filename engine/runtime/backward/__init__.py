"""Backward passes through a stage: both gradients at once, or those of weights later."""
