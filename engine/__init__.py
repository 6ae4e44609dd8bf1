"""The pipeline engine: planner and runtime. Not there yet; see docs/design.md."""
