"""Code and commands in README and docs."""
