"""What happens around a training step: tuning, recomputation, evaluation, figures."""
