"""Context parallelism times data parallelism on a device mesh."""
