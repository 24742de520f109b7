"""Count a running rank's bytes and collectives."""
