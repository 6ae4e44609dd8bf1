"""Plain readings of algorithms and proven bounds, to compare with."""
