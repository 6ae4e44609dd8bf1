"""Raw datasets: finding them by name or place, and streaming their records in order."""
