"""VeOmni: what its environment runs."""
