"""Data parallelism from sends and receives: see train.py."""
