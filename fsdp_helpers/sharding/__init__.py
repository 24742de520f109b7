"""Sharding a model across ranks: strategies, units, recomputation and gradients."""
