"""How a model is spread over ranks: strategies, units, recomputation, gradients."""
