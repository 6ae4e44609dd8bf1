"""Sizes and lengths of image and audio files, from their headers."""
