"""Plans of training: partition, recomputation, schedule, predicted times."""
