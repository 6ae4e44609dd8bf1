"""The science of Isobatch: pure functions on NumPy arrays that the packer, the loaders and the
engine share.

Nothing here reads a file (but the presets), imports torch, or knows what a shard is.
"""
