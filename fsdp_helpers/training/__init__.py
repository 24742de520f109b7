"""A run: its start, its rank function, its loop, and its observers."""
