"""Sharding a model across ranks: strategies, units, recomputation, gradients."""
