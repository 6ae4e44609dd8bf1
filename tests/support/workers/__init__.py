"""Datasets that worker processes of a loader import."""
