"""Rank functions that each show one idea; the notebooks display them, then run them."""
