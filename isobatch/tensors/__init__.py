"""Torch code that loaders and the engine share: the loss, and rotary positions."""
