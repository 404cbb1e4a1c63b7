"""What a one-process training script needs: options, data, models, metrics, checkpoints, records.

Nothing here knows of ranks exchanging data: every process group, collective and wrapper stands in
the train.py of the recipe that teaches it.
"""
