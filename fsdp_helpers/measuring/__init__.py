"""Count a running rank's bytes and collectives, and profile a step of any model, for `planning`."""
