"""The data: MNIST or the bundled digits, and text; the same for any number of ranks."""
