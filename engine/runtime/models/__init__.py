"""Models of transformers as lists of layers that a pipeline can cut anywhere, with their weights in
and out.
"""
