"""Raw datasets: found by name or place, their records streamed in order."""
