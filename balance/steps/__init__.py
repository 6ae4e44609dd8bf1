"""Balance of a single step: its samples to batches, batches to ranks, and what ranks send."""
