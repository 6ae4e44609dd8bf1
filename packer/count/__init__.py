"""Counting: raw records -> staged samples with tokens, on processes."""
