"""A run: its rank function, its loop, what watches it, and what starts it."""
