"""Walk through a step event by event, for each way of training."""
