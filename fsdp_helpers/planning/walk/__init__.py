"""Walk through one step, event by event, for each way of training."""
