"""Processes that work together: started, joined and stopped, with nothing left behind."""
