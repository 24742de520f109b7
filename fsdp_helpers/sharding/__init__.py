"""Sharding of a model over ranks: strategies, units, recomputation, gradients."""
