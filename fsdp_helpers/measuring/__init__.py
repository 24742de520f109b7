"""Counting the bytes and collectives of a running rank."""
