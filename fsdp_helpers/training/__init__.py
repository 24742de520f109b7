"""A run: its rank function, its loop, what observes it, and what starts it."""
