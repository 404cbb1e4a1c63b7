"""Horovod: see train.py."""
