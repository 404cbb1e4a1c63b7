"""What recipes/apex asks of NVIDIA apex 25.05, in a few lines for a CPU: bfloat16 for float16, calls on record."""

EVENTS: list[str] = []
