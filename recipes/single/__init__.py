"""The one-process baseline: see train.py."""
