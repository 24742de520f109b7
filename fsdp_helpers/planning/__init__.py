"""Predict memory and time by arithmetic alone. No torch import."""
