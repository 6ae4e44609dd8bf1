"""Simulation of one training step: schedules, times and memory. Pure."""
