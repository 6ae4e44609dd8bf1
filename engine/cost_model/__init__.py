"""Cost models: time and memory of layers, modelled or profiled. Pure."""
