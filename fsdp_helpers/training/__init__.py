"""Training runs: how they start, what each rank does, the training loop, and how it's observed."""
