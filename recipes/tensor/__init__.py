"""Tensor parallelism x data parallelism on a device mesh."""
