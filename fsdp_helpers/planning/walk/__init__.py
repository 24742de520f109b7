"""Walk through a step event by event, with FSDP2 or without sharding."""
