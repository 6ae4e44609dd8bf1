"""Models that the trainer opens: those of transformers, and tiny ones for demos."""
