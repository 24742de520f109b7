"""Walk through a step event by event, with FSDP1, with FSDP2 or without sharding."""
