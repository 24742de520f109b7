"""Checkers of the exercises, and the code their ranks run."""
