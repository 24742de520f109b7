"""Failures to look at: each one broken on purpose, and mended, in rank functions of a few lines."""
