"""Cost models: time and memory of layers for micro-batches, modelled or profiled. Pure."""
