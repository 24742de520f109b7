"""Checkpoints: training state, saved atomically and loaded without running any code from the files."""
