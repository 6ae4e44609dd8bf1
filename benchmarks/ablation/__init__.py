"""What the measured ablations share: data, a model that computes, layers that wait, and ranks that
run them.
"""
