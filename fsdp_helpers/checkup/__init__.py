"""What this machine can do, one line per check."""
