"""The code behind everything that the notebooks show, draw and check."""
