"""Failures to study: each one broken on purpose, and fixed, in rank functions of a few lines."""
