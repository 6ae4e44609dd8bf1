"""Counting: a raw record -> a counted sample with its tokens, offline and online."""
