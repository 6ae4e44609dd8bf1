"""Charts of simulated and measured steps: HTML and Perfetto traces."""
