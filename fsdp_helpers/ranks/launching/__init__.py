"""The launcher: start ranks from a fork server, watch them, and bring their results home."""
