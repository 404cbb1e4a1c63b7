"""DistributedDataParallel: see train.py."""
