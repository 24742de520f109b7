"""Processes that work together: started, joined, stopped, leaving nothing behind."""
