"""The data: MNIST or the bundled digits, and text. They're the same on any number of ranks."""
