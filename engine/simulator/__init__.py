"""One training step as arrays: who computes what when, what waits for what, what memory is held.
Pure.
"""
