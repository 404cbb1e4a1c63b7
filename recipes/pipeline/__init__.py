"""Pipeline parallelism x DDP on a device mesh."""
