"""Search for the fastest partition: local search, and a bound of what could be faster."""
