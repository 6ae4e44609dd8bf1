"""Trainers of other frameworks: their environments, and what they train."""
