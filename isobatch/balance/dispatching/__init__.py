"""A step's samples to ranks, and how they get there: OrchMLLM's algorithms, several loads."""
