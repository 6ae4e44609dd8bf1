"""Training state, saved by all ranks and loaded on any other partition."""
