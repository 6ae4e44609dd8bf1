"""Training state that all ranks save and any other partition can load."""
