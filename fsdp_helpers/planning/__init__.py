"""Predictions of memory and time from arithmetic alone. No torch import."""
