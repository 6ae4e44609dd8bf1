"""OrchMLLM: each phase of a step balanced separately, and exchanges. Pure."""
