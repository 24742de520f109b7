"""The data: MNIST or the bundled digits, and text; the same whatever the number of ranks."""
