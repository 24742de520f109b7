"""Walk through a step event by event, under FSDP1, under FSDP2, or unsharded."""
