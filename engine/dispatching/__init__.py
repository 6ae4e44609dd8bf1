"""OrchMLLM: each phase of a step balanced separately, and the exchanges between ranks. Pure."""
