"""Search for the fastest partition: local search, and a bound of the best."""
