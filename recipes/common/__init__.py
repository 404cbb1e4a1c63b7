"""What all recipes share: options, data, models, checkpoints, records, and what ranks do together.

Only world.py uses torch.distributed for it: gathers, broadcasts and barriers on the CPU. What exchanges gradients
or activations stands in the train.py of the recipe that teaches it.
"""
