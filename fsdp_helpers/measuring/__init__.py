"""Count the bytes and the collectives of a running rank."""
