"""Failures to study, each with a broken and a fixed version as short rank functions."""
