"""What loaders and the engine share that needs torch: the loss, and rotary positions."""
