"""Data parallelism by hand: see train.py."""
