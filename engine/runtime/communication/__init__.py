"""Everything that ranks send to each other: process groups, messages and collectives."""
