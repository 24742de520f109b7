"""MNIST or the bundled digits, and text: read once, and the same on any number of ranks."""
