"""What the notebooks show, draw and check."""
