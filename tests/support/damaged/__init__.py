"""Damaged files, drawn by a seed: how they are changed, and which kinds there are."""
