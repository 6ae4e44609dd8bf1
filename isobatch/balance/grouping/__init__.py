"""Samples -> groups under caps: best fit or ISF, and the choice of the caps."""
