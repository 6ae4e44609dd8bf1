"""A plan for a whole training run: which rank has which layers, what is computed again, in which
order passes run.
"""
