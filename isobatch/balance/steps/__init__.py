"""Balance of one step: samples to batches, batches to ranks, volumes sent."""
