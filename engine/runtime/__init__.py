"""The runtime: trains a model as a plan says, over torch.distributed. The only part of `engine`
that needs torch.
"""
