"""Rank functions and complete jobs that notebooks show and launch, and torchrun, XLA and accelerate, started from cells."""
