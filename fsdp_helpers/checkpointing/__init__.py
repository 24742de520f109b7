"""A training state on disk: whole or not there, and read without running it."""
