"""The programs that take part in make bench beside the recipes: bare loops, and the peers as documented.

Each is started as `python -m scripts.bench.contenders.NAME ...`, several processes under torchrun. The last line
that rank 0 prints is a JSON object, what it has measured. The first steps are not timed, as in a recipe.
"""
