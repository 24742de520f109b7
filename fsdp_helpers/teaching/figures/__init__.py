"""Figures and drawings, in one style."""
