"""The events of one step, in order, as each way of training has them."""
