"""Parts of `gpu_training.py`: layers of published shapes and measurements on one GPU."""
