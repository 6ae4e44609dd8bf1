"""Data-parallel ranks: which one this is, and what they tell one another."""
