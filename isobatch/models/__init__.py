"""Models: what they are, what their media become, and what their layers cost."""
