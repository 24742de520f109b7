"""Failures to study: each has a broken and a fixed version, as rank functions of a few lines."""
