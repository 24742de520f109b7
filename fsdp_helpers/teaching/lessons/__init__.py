"""Rank functions, one idea each: the notebooks show them, then run them."""
