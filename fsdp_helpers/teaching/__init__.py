"""Everything that the notebooks show, draw and check."""
