"""Training state on disk: saved atomically, and read without running any code from it."""
