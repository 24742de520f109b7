"""MNIST or the bundled digits, and text: read once, the same on every number of ranks."""
