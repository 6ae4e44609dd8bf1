"""Runtime that trains a model as a plan says, over torch.distributed.

With `engine.train`, the only part of the engine that imports torch.
"""
