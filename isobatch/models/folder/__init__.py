"""A model's folder, as transformers saves it, to a `ModelPreset`."""
