"""DDP times pipeline stages: see train.py."""
