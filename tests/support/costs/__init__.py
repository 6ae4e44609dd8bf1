"""Costs, loads and steps for the planner, the simulator and the tuner."""
