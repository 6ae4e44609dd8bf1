"""PipeTune: packing, order and encoder pre-computation, chosen anew for every step. Pure."""
