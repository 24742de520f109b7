"""Check this machine: one line for each check."""
