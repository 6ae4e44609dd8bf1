"""Checks that run in the environment of a framework, next to its own code."""
