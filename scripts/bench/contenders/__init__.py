"""Programs that make bench measures the recipes against, each written as its own documentation would have it.

Each is a process of its own: `python -m scripts.bench.contenders.NAME ...`, several of them under torchrun. Its
last line is JSON, {"samples_per_s": ..., "losses": [...]}, printed by rank 0. The first step is not timed, as in a
recipe.
"""
