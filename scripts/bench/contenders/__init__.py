"""The programs that take part in make bench beside the recipes: bare loops, and the peers as documented.

Each is started as `python -m scripts.bench.contenders.NAME ...`, or under torchrun if it has several processes.
Rank 0 prints its measurements as a JSON object on a line of its own; first_step only makes a file. As in a
recipe, warm-up is not timed.
"""
