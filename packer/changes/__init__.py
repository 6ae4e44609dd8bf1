"""Finished builds that change: data added, builds merged, samples removed."""
