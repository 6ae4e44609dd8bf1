"""Plans of a training run: partition, recomputation, schedule, and their predicted times."""
