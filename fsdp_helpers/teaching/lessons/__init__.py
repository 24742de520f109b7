"""Rank functions, one idea each: what the notebooks show, and then run."""
