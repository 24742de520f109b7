"""Checks of this machine, one line each."""
