"""Backward passes through a stage: both gradients at once, or weights' later."""
