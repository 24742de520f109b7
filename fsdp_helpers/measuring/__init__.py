"""Bytes and collectives of a running rank, counted."""
