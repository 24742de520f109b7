"""Checkers of the exercises, and what their ranks run."""
