"""Shared parts of the measured ablations: data, models, stand-in layers and ranks."""
