"""Options of `python -m engine train` and `measure`, by subject."""
