"""Predictions of memory and time by arithmetic alone. No torch import."""
