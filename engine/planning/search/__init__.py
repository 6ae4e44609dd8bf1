"""Exact search for the fastest partition: bounds, windows, branch and bound."""
