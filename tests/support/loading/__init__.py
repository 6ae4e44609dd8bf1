"""Runs of loaders, and what makes them fail."""
