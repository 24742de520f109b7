"""The events of one step, in order, for each way of training."""
