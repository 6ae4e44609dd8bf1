"""The pipeline engine: a planner that needs no torch, and the runtime that trains by its plans."""
