"""Parameters as an optimizer gets them, in a run's training mode."""
