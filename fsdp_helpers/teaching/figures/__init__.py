"""Plots and drawings in one style, with titles and descriptions made from their data."""
