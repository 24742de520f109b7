"""Checkers for the exercises, and the code that their ranks run."""
