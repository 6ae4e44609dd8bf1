"""Training by a plan: `python -m engine train` and `measure`.

Runs the pipeline of `engine.runtime` with a loader's steps, figures per step, saved state, tuning
and adaptive recomputation. Only `engine.train.cli` imports `loaders` (`engine.train.step_source`).
"""
