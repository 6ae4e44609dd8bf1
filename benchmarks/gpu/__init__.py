"""What `gpu_training.py` is made of: layers of published shapes, one GPU, and what is measured on
it.
"""
