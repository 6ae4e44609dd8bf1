"""A model's folder, as transformers saves it, to a `ModelPreset`: one reader per family."""
