"""Stored image and audio files to pixels, waveforms and log-mel features."""
