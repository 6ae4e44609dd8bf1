"""PipeTune: packing, order and early encoding for every step. Pure."""
