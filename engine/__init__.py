"""The pipeline engine: a planner without torch, and the runtime that executes its plans (not there yet)."""
