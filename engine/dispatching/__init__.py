"""OrchMLLM: every phase of a step balanced by itself, and what then travels between ranks. Pure."""
