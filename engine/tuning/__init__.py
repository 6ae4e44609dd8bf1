"""PipeTune: packing, order and encoder pre-computation, chosen for every step. Pure."""
