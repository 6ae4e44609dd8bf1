"""The report of a build: what packing does to balance, as text, page and JSON."""
