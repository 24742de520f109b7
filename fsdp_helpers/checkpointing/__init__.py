"""Checkpoints: training state that's saved atomically and loaded without running any code from the files."""
