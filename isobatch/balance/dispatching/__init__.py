"""Samples of a step to ranks: OrchMLLM's algorithms, several loads at once."""
