"""Fully sharded data parallelism: see train.py."""
