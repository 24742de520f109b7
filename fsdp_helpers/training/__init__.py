"""A run: the rank function, its loop, who looks on, and what starts it."""
