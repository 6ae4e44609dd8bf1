"""Simulation of one training step: schedules, dependencies, times and memory as arrays. Pure."""
