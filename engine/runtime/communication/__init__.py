"""Communication of ranks: process groups, messages and collectives."""
